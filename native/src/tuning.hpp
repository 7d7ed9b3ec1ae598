// The planner's constants: see planner.cpp for where each is used.
#pragma once

#include <cmath>

namespace eagle3 {

struct tuning {
    float keep_tally = 0.995f;
    float keep_rate  = 0.98f;
    float keep_gain  = 0.95f;
    float prior      = 8.0f;
    float trust_step = 0.05f, trust_least = 0.1f, trust_most = 3.0f;
    float trust_step_resting = 0.2f;
    float keep_awake         = 0.25f;
    float least_gain = 1.0f, least_of_many = 1.04f;
    float most_loss = 0.02f;
    int min_drafts  = 12;
    int nap_first = 8, nap_most = 64, probes = 6;
    int idle = 2, idle_of_many = 1;
    int look_close = 16, look = 128, first_looks = 4;
    float close_gain = 1.15f;
    float keep_drift = 0.95f, keep_plain = 0.9f, keep_head = 0.8f;
    float fade = 0.98f, fade_plain = 0.995f;
    float relax = 1.0f / 96.0f, relax_size = 1.0f / 600.0f;
    float stale = 0.5f, try_two = 0.3f, try_piece = 0.7f;
    float hope = 0.4f, hope_anew = 0.15f;
    float changed       = 0.3f;
    float surprised     = 0.2f;
    int hurry           = 8;
    float keep_surprise = 0.85f, turned = 2.0f;
    float keep_excess = 0.95f, turned_awake = 6.0f;
    float curious     = 0.8f;
    float least_ratio = 0.5f, most_ratio = 2.0f;
    float most_rest   = 0.25f;
    int ahead         = 4;
    int pardons       = 2;
    float first_guess = 0.5f, next_guess = 0.1f;
    float least_weight = 2.0f;
    float doubt        = 0.5f;
};

}  // namespace eagle3
