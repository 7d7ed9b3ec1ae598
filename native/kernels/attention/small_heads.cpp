#include "attention/attend.hpp"

namespace eagle3::kernels::attention {

const attend attend_64 = attend_units<64 / LANES, 64 / LANES>;
const attend attend_80 = attend_units<80 / LANES, 80 / LANES>;
const attend attend_96 = attend_units<96 / LANES, 96 / LANES>;

}  // namespace eagle3::kernels::attention
