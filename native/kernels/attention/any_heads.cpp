#include "attention/attend.hpp"

namespace eagle3::kernels::attention {

const attend attend_any = attend_units<0, 0>;

}  // namespace eagle3::kernels::attention
