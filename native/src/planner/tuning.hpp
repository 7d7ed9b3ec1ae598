// The planner's constants. Each has its unit, its reason, and what half and twice its value do, and what it
// is like without it: tokens a second, in percent of what they are with the value below, by
//
//     planner_constants [NAME...]      (native/tests; the build of `native/build.py --tests`)
//
// which simulates rounds on 26 cases: texts that are easy to foresee, hard, or turn; loads that come and go;
// costs that were measured under a load; for most_rest also a caller that is slow now and then. The first
// number is the mean of all cases, the second is of the case that loses most, with one slot (x1) or four.
// Luck makes up to 0.05 of a mean and 0.5 of a case, up to 1 where texts or loads change.
//
// "Keeps x" is a window: at each further observation, what was seen before counts x times as much, so about
// the last 1 / (1 - x) count. Half and twice are those of the window, of a ratio those of what is above 1.
#pragma once

#include "limits.hpp"

namespace eagle3 {

struct tuning {
    // -- What the head's estimates are worth --
    // Keeps 0.995 of a bin's counts: some 200 draft tokens. Shorter follows texts, longer is surer.
    // half +0.03, drafts dearer x1 -0.25; twice -0.04, load comes and goes x4 -0.34; without -0.10, load
    // comes and goes x1 -0.51.
    float keep_tally = 0.995f;
    // Observations that the estimate itself counts for in a bin. Without it, the first hit or miss decides.
    // half -0.16, misjudged turns x1 -1.46; twice -0.10, misjudged turns x1 -1.44; without -1.32, turns x1
    // -5.24.
    float prior = 8.0f;
    // Hits that all first tokens of the head have before it is known whether its estimates hold for them.
    // They only lower estimates. It is for a head that is sure and always wrong: on the hybrid of
    // scripts/measure/compare.py (hybrid) it then has 0.99 of plain decoding's speed instead of 0.98.
    // half -0.09, turns x1 -1.59; twice -0.05, turns x1 -1.02; without -0.09, turns x1 -1.52.
    float shared = 8.0f;
    // Probability that the head's likeliest child is right, before anything is known of the level.
    // half -0.14, load comes and goes x1 -1.09; twice -0.11, misjudged turns x1 -0.96; without -0.07, turns
    // x1 -0.62.
    float first_guess = 0.5f;
    // The same of each further child.
    // half -0.02, jolted x1 -0.27; twice -0.05, load comes and goes x1 -0.32; without -0.04, misjudged turns
    // x1 -0.81.
    float next_guess = 0.1f;
    // Of the surprise of a draft token, what goes into the logarithm of the slot's trust: a text differs from
    // others for tens of tokens.
    // half -0.19, misjudged turns x1 -3.00; twice -0.19, misjudged turns x1 -0.87; without -0.38, misjudged
    // turns x1 -3.34.
    float trust_step = 0.05f;
    // The same of first tokens while drafting takes its longest rests: a token in ten rounds has to teach it.
    // half -0.03, misjudged turns x1 -0.75; twice -0.04, load comes and goes x1 -0.73; without -0.06, load
    // comes and goes x4 -0.85.
    float trust_step_resting = 0.2f;

    // -- What rounds bring --
    // Keeps 0.98 of tokens and seconds: some 50 rounds. It is the rate that a draft's time is weighed by.
    // half -0.09, misjudged turns x1 -1.01; twice +0.02, turns x4 -0.38; without -0.03, misjudged turns x1
    // -0.89.
    float keep_rate = 0.98f;
    // Keeps 0.95 of what drafts are expected to gain: some 20 rounds. One poor draft is no cause to rest.
    // half -0.04, misjudged turns x1 -0.98; twice -0.06, misjudged turns x1 -1.45; without -1.26, drafts
    // measured busy x1 -4.85.
    float keep_gain = 0.95f;
    // The measured rate of drafting over that of plain decoding below which it rests.
    // half +0.00; twice +0.00; without -0.09, load comes and goes x1 -0.85.
    float least_gain = 1.0f;
    // Expected loss of drafting, tokens a round, that is no cause to rest: a draft not made teaches nothing.
    // half -0.03, load comes and goes x1 -0.82; twice -0.02, misjudged turns x1 -0.64; without -0.05,
    // misjudged turns x1 -1.53.
    float most_loss = 0.02f;
    // Rounds with drafts before drafting may be given up.
    // half -0.04, misjudged turns x1 -2.90; twice -0.17, load comes and goes x4 -1.18; without -1.74, drafts
    // dearer x4 -8.96.
    int min_drafts = 12;
    // Time that drafts of a lone slot cost in a row of which nothing was accepted, in tokens, that suffices
    // too: it is for the first text of a head that is always wrong, and where a checkpoint takes drafts back.
    // half -0.07, load comes and goes x1 -0.97; twice -0.07, misjudged turns x1 -3.18; without -0.04,
    // misjudged turns x1 -2.07.
    float most_missed = 0.75f;
    // Of that, what a rest leaves.
    // half -0.03, misjudged turns x1 -1.43; twice -0.09, misjudged turns x1 -1.73; without -0.05, misjudged
    // turns x1 -3.45.
    float keep_missed = 0.7f;
    // Of what a head's first token must bring to pay for its row and its pass, the part below which it counts
    // as wrong: a text then begins with the longest rests. No value changes anything in the 26 cases, whose
    // texts are long. In those of `planner_states_test texts`, of 64 tokens, without it and most_missed
    // (as 1.5) -1.5 where nothing can be foreseen, and -0.4 where the head is always wrong.
    float wrong = 0.5f;

    // -- Rests: rounds for which nothing is drafted --
    // Rounds of the first rest; each further one is twice as long.
    // half -0.20, misjudged turns x1 -2.02; twice -0.01, misjudged turns x1 -2.44; without -0.08, misjudged
    // turns x1 -1.50.
    int nap_first = 8;
    // Rounds of the longest: a change is noticed within 200 rounds, which have to hold three rests.
    // half +0.10, drafts dearer x4 -0.38; twice -0.19, misjudged turns x1 -3.68; without -0.12, misjudged
    // turns x1 -3.02.
    int nap_most = 64;
    // Of that of one slot, what stays when another text begins: where texts are short, each would try anew.
    // No value changes anything in the 26 cases, whose texts are long. On recorded answers of 64 tokens
    // (`replay`), where a second row costs as much as the first, in percent: half -0.5; all of it +0.6, and
    // -0.6 where rows cost less; without -0.7.
    float keep_nap = 0.5f;
    // Rounds awake after a rest, before the next may begin.
    // half +0.07, misjudged turns x1 -1.97; twice -0.17, load comes and goes x4 -1.32; without -0.31, load
    // comes and goes x4 -2.78.
    int probes = 6;
    // Of what drafts brought, what counts after a rest: texts turn.
    // half -0.03, load comes and goes x1 -0.59; twice -0.07, load comes and goes x4 -0.83; without -0.15,
    // load comes and goes x1 -1.28.
    float keep_awake = 0.25f;

    // -- Whether a text or the machine has become another --
    // While resting, keeps 0.85 of the hits of first tokens above what was expected: a window of 7.
    // half -0.01, misjudged turns x1 -0.72; twice -0.09, misjudged turns x1 -1.18; without -0.10, misjudged
    // turns x1 -2.18.
    float keep_surprise = 0.85f;
    // As many hits in that window show that the text has turned: more than two deviations, as the price is
    // some drafts.
    // half -0.39, drafts dearer x4 -3.56; twice -0.08, misjudged turns x1 -2.07; without -0.10, misjudged
    // turns x1 -2.07.
    float turned = 2.0f;
    // Keeps 0.95 of the same hits at all times: a window of 20.
    // half -0.02, misjudged turns x1 -0.23; twice -0.04, jolted x1 -0.38; without -0.04, misjudged turns x1
    // -0.84.
    float keep_excess = 0.95f;
    // As many hits in that window, nearly four deviations, show it too.
    // half -0.05, easy x1 -0.42; twice -0.04, misjudged turns x1 -0.84; without -0.04, misjudged turns x1
    // -0.84.
    float turned_awake = 6.0f;
    // First tokens of each slot that trust it in full again after a turn.
    // half -0.01, misjudged turns x1 -0.37; twice +0.01, turns x1 -0.07; without -0.04, misjudged turns x1
    // -0.69.
    int pardons = 2;
    // A drift of plain rounds, as a logarithm, that makes it another machine.
    // half -0.07, load comes and goes x4 -1.04; twice -0.03, jolted x4 -0.34; without -0.00, jolted x4 -0.34:
    // but without it, drafts that were measured under a load have 0.73 of the best fixed length where rows
    // are dear (`planner_states_test heavy`).
    float changed = 0.3f;
    // After every second rest: of a row's cost, what a draft must bring to be tried, as the row may cost
    // less.
    // half -0.01, turns x4 -0.08; twice -0.01, misjudged turns x1 -0.92; without -0.02, misjudged turns x1
    // -1.23.
    float hope = 0.4f;
    // The same before anything was seen of drafts, or where text or machine has become another.
    // half -0.00, load comes and goes x4 -0.03; twice +0.00, load comes and goes x4 -0.42; without -0.74,
    // drafts measured busy x1 -19.37.
    float hope_anew = 0.15f;

    // -- Looks: plain rounds between drafts, so that their time is known --
    // Rounds from one look to the next, of the first ones.
    // half -0.23, misjudged turns x1 -2.23; twice -0.10, load comes and goes x1 -0.79; without -0.06, drafts
    // measured busy x4 -2.61.
    int look_close = 16;
    // The same of further ones.
    // half -0.29, jolted x1 -1.07; twice +0.20, measured busy x4 -0.21; without -0.86, load comes and goes x1
    // -2.31. With twice the value plain decoding is known from half as many looks: on recorded runs with a
    // head the standard deviation of the forecast is then 3.3% instead of 2.7%.
    int look = 64;
    // Looks that are close, at the start.
    // half -0.02, drafts measured busy x4 -0.25; twice -0.08, drafts measured busy x4 -0.55; without -0.12,
    // drafts measured busy x4 -2.62.
    int first_looks = 4;
    // A decode's time that differs so much from the expected, as a logarithm, brings the next look nearer.
    // half -0.20, misjudged turns x1 -2.04; twice -0.08, load comes and goes x1 -0.78; without -0.95, drafts
    // measured busy x1 -19.62.
    float surprised = 0.2f;
    // Rounds by which it does.
    // half -0.04, drafts measured busy x4 -0.53; twice -0.13, load comes and goes x1 -1.41; without -0.09,
    // measured busy x4 -1.13.
    int hurry = 8;

    // -- How measured costs are corrected --
    // Of decodes with drafts: keeps 0.95 of the weight of what was seen. Some 20 decodes.
    // half +0.00, misjudged turns x1 -1.34; twice -0.12, load comes and goes x1 -1.09; without -0.29, jolted
    // x1 -3.48.
    float keep_drift = 0.95f;
    // The same of plain decodes, which are rare, and of what rounds take beside them: 10.
    // half -0.14, load comes and goes x4 -1.19; twice -0.03, misjudged turns x1 -1.38; without -0.12, load
    // comes and goes x4 -0.89.
    float keep_plain = 0.9f;
    // Times that the newest counts against, at least: half of what it says is believed at once.
    // half -0.09, misjudged turns x1 -0.68; twice -0.05, measured busy x4 -0.63; without -0.09, misjudged
    // turns x1 -0.68.
    float least_weight = 2.0f;
    // Keeps 0.98 of a weight in each round that does not show it.
    // half -0.08, misjudged turns x1 -0.83; twice -0.09, load comes and goes x1 -0.63; without -0.07, drafts
    // dearer x4 -1.20.
    float fade = 0.98f;
    // The same of plain decodes' in rounds with drafts.
    // half -0.04, load comes and goes x4 -0.54; twice -0.05, load comes and goes x1 -0.46; without -0.07,
    // load comes and goes x4 -0.49.
    float fade_plain = 0.995f;
    // Of a correction, what is forgotten in each round without drafts. Slower, and a load is remembered for
    // too long; faster, and costs that were measured wrong are back before the next draft.
    // half -0.02, load comes and goes x4 -0.43; twice -0.13, load comes and goes x1 -1.35; without -0.22,
    // misjudged turns x1 -2.94.
    float relax = 1.0f / 96.0f;
    // The same of sizes that are not drafted, in rounds with drafts, and of one slot's cheap rows: such
    // drafts cost it least.
    // half -0.04, misjudged turns x1 -0.72; twice -0.06, load comes and goes x1 -0.60; without -0.05, load
    // comes and goes x4 -0.23: but without it, planner_test's costs that were measured wrong are not found.
    float relax_size = 1.0f / 600.0f;
    // Lower bound on a decode's measured time, as a share of the expected one. It keeps a wrong clock out.
    // half -0.03, measured busy x1 -0.41; twice -3.62, drafts measured busy x1 -33.45; without -0.03,
    // measured busy x1 -0.41.
    float least_ratio = 0.5f;
    // The most: what took longer was disturbed.
    // half -1.64, drafts measured busy x4 -23.62; twice -0.05, load comes and goes x1 -0.73; without -0.05,
    // load comes and goes x1 -0.73.
    float most_ratio = 2.0f;
    // Upper bound on a draft round's unexplained overhead, as a share of a plain round's time.
    // half -0.00, slow caller x4 -0.05; twice +0.00; without -0.01, slow caller x1 -0.27.
    float most_rest = 0.25f;

    // -- The forecast: no value changes what is drafted, but for settled --
    // Plain rounds after a draft that take longer than those that follow: two, as the output matrix and the
    // head displace weights in the cache. A look has one more.
    // half +0.23, turns x1 -0.46; twice -0.29, misjudged turns x1 -1.38; without +0.32, turns x1 -0.47. The
    // forecast needs two.
    int settled = 2;
    // Upper bound on a round's time, in units of the expected one: what took longer was disturbed.
    float disturbed = 3.0f;
    // Keeps 0.999 of what plain rounds took: some 1000 rounds.
    float keep_usual = 0.999f;
    // Upper bound on a round's time near a look, in units of the look's own time.
    float most_usual = 1.35f;
    // Rounds that the measured costs count for beside looks.
    float n_usual = 48.0f;
    // Rounds that the measured costs count for beside those near a look.
    float n_near = 2.0f;

    // -- The output matrix, and how far to grow --
    // A weight so low that pieces of the output matrix are tried.
    // half -0.02, load comes and goes x1 -0.99; twice -0.04, drafts dearer x1 -0.39; without -0.21, drafts
    // measured busy x1 -3.83.
    float stale = 0.5f;
    // As if two rows cost so much of what is thought: they lose least if they do not.
    // half -0.01, drafts measured busy x1 -0.10; twice -0.14, drafts measured busy x1 -3.83; without -0.15,
    // drafts measured busy x1 -3.83.
    float try_two = 0.3f;
    // Levels that growing looks ahead.
    // half -0.00, turns x1 -0.13; twice -0.00, turns x4 -0.12; without -0.04, turns x4 -0.31: but with one
    // level, drafts have 0.83 of the best fixed length on costs with a dear step (planner_test, Q4_0).
    int ahead = 4;
};

// Those of drafts that take no pass of the head. What half and twice the value do is the mean over eight cost
// curves, in percent, by `replay FILE "" both NAME=VALUE` (native/tests) on answers to 40 prompts of
// scripts/data/eval_prompts.jsonl that scripts/measure/record_texts.py recorded. Differences of 0.5 are luck.
struct text_tuning {
    // Of the surprise of a draft token, what goes into the logarithm of the slot's trust, here of the odds.
    // The length and the number of its matches say most of it already.
    // half -0.6; twice -0.1; without -0.5.
    float trust_step = 0.02f;
    // How often all first tokens of a source were right changes what each of its estimates is worth. At the
    // start the estimates themselves count as much as so many tokens that were right and as many that were
    // wrong. Without it each bin has to learn by itself that a text cannot be foreseen: the first 128 tokens
    // of such a text take 0.7% longer (Q8_0, cheap rows). half -0.4; twice -0.4; without +0.3.
    float shared = 4.0f;
    // The most by which that divides the odds: short matches say little of long ones. It never multiplies
    // them, which would gain 0.1 without a head and lose 0.4 with one.
    float most_shared = 4.0f;
    // Of the probability of first tokens that cost no pass, what is taken for granted when the head's passes
    // are weighed against it: the head also tells whether they are right.
    // half -1.0; all of it -0.7; without -1.0.
    float sure = 0.7f;
    // Rounds in which such tokens were offered and declined, until one is tried all the same. On constant
    // costs no value changes anything; it is for costs that were measured under a load.
    int declined = 128;
};

// Those of the number of threads. What they do is shown by thread_test on simulated machines.
struct thread_tuning {
    // A number of threads must take at most so much of the present one's time to be better: else noise
    // decides.
    float better = 0.93f;
    // Rounds of a trial: in a single one, another program may have been absent by luck.
    int trial = 4;
    // Rounds whose mean is what the present number takes. A shorter one takes a short disturbance for a
    // lasting one.
    int window = 12;
    // A trial ends before that when the rest of its rounds could not make it the better one, even if each
    // took this part of the present number's time.
    float hope = 0.5f;
    // Fewer threads are tried when rounds took so much longer, in units of a round, than fewer are thought to
    // take: one or two rounds in which all wait for a thread that another program delays. Twice it loses 2%
    // of 64 rounds beside a busy core; half of it gains nothing (thread_test's machines).
    float enough_excess = 1.5f;
    // Upper bound on what one round counts for it: one hiccup of the system is no reason.
    float most_excess = 4.0f;
    // Rounds before fewer threads may be tried. Each trial that fails doubles it.
    int first_wait = 2;
    // The same number for more threads, and the most that either becomes. Beside a busy core a trial of two
    // threads takes as long as three to five rounds (SmolLM2 in Q4_0, AMD EPYC, Zen 5). Half of these waits
    // loses 1 to 2% there. With twice, 500 rounds after the core became free take 15% longer (thread_test's
    // machines).
    int first_wait_more = 96;
    int most_wait       = 192;
    // Of the measured time, the most that counts of a round.
    float most_ratio = 12.0f;
};

}  // namespace eagle3
