// What is said when ggml gives up: a device that fails takes the process with it.
#pragma once

namespace eagle3 {

// From now on one line tells that a device has failed, in place of a trace of the stack. A callback that
// somebody else has set stays.
void tell_of_lost_devices();

}  // namespace eagle3
