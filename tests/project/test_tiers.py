"""The two tiers: what a quick run leaves out and says of it, and that the rules of CONTRIBUTING hold."""

import re

import pytest
from paths import ROOT
from test_test_command import GOOD, tried
from tiers import NOT_FOR_QUICK, SLOW_FOLDERS, each

MIXED = """import pytest
from tiers import each

@pytest.mark.thorough
def test_slow(): pass

@pytest.mark.parametrize("n", each(range(5), quick=[3]))
def test_each(n): pass
"""


def counts(out):
    return {word: int(n) for n, word in re.findall(r"(\d+) (passed|deselected|failed)", out)}


@pytest.mark.parametrize(
    "more, passed, left",
    [
        ([], 3, 5),
        (["--all"], 8, 0),
        (["test_mixed.py::test_slow"], 1, 0),
        (["test_mixed.py::test_each"], 5, 0),
        (["test_mixed.py"], 1, 5),
    ],
)
def test_what_is_run(tmp_path, more, passed, left):
    """With --all everything; what is named, whatever its tier; otherwise the quick tests, and a last line."""
    folder = tmp_path / "t"
    named = [folder / word if word[0] != "-" else word for word in more]
    out = tried(folder, {"mixed": MIXED, "good": GOOD}, *named, code=0, whole=not named or more == ["--all"])
    assert counts(out)["passed"] == passed, out
    line = f"{left} thorough tests were not run: ./scripts/test --all runs them"
    assert (out.rstrip().splitlines()[-1] == line) == bool(left), out


def test_folders_that_are_not_collected(tmp_path):
    """They are not even imported, and counted as files."""
    folder = tmp_path / "t" / "tests" / SLOW_FOLDERS[-1]
    folder.mkdir(parents=True)
    (folder / "test_it.py").write_text("import no_such_module\n")
    out = tried(tmp_path / "t", {"good": GOOD}, code=0)
    assert out.rstrip().endswith(
        "0 thorough tests were not run, nor those of 1 file: ./scripts/test --all runs them"
    )
    assert "no_such_module" in tried(tmp_path / "t", {"good": GOOD}, "--all", code=None)


def test_a_quick_test_that_imports_too_much(tmp_path):
    text = "import sys, types\n\ndef test_it(): sys.modules['torch'] = types.ModuleType('torch')\n"
    out = tried(tmp_path / "t", {"imports": text})
    assert "1 passed" in out and "quick tests must not import torch" in out and "torch" in NOT_FOR_QUICK


def test_values_of_which_none_is_quick():
    with pytest.raises(AssertionError, match="none of them is quick"):
        each([1, 2], quick=[3])


NEEDS = "needs what only --all has: see rule 1 of CONTRIBUTING"
# What README's table promises, and what the changelog says was mended, by the beginning of its line.
PROMISES = {
    "Same text": "llama/test_same_text.py::test_samplers",
    "Drafts": "runtime/test_trees.py::test_text_of_drafted_trees",
    "Targets": "native/test_architectures.py::test_capture_is_the_graphs",
    "Heads": "heads/test_variants.py::test_drafts_and_text",
    "Training": NEEDS,
    "Serving": "server/test_server_api.py::test_the_text_is_eagle_llamas",
    "Images, sound": "llama/test_images.py::test_same_text",
    "Hybrids, windows": "runtime/test_windows.py::test_drafts_do_not_change_the_text",
}
MENDED = {
    "Any text is tokenized": "native/test_pre_tokenizers.py::test_long_texts_are_tokenized",
    "The text no longer depends on how": "native/test_invariance.py::test_rows_are_alike",
    "`save_state()` beside a generation": "llama/test_ownership.py::test_a_generation_waits_for_a_save",
    "A LoRA adapter": "llama/test_target_settings.py::test_a_file_that_is_no_lora_of_the_model",
    "`Llama` with `logits_all=True`": "llama/test_scores.py::test_generation_fills_scores",
    "Compute memory": "runtime/test_memory_use.py::test_logits_of_more_rows_than_there_is_memory_for",
    "Failed rounds": "runtime/test_windows.py::test_a_text_that_is_cut_back_goes_on_as_if_it_were_new",
    "Model files are checked": "common/test_model_files.py::test_wrong_files",
    "Training: `linalg.cholesky`": NEEDS,
    "The server tokenises": "server/test_server_bounds.py::test_two_prompts_are_tokenised_at_a_time",
    "The server survives": "server/test_server_descriptors.py::test_descriptors_that_run_out_and_come_back",
    "A head that was made for another": "common/test_words.py::test_a_head_of_another_tokenizer_is_told",
    "Layers on a device": NEEDS,
    "The check after a build": "native/test_proof.py::test_a_slow_machine_is_no_fault",
    "Errors in llama.cpp's C functions": "native/test_c_functions.py::test_functions_that_are_made_to_fail",
    "An answer that the context's end": "llama/test_answer_text.py::test_an_answer_that_the_context_cuts",
    "While others generate": "batching/test_batching_requests.py::test_a_fixed_draft_beside_others",
    "Streams echo": "llama/test_answer_text.py::test_streams_keep_what_a_stop_string_held_back",
    "Requests that outlive": "batching/test_batching_ends.py::test_a_request_after_close",
    "Training goes on only": NEEDS,
    "`train` says rates": NEEDS,
    "Models in several files": "common/test_split_models.py::test_missing_parts_are_named",
    "Bounds are above": "server/test_other_servers.py::test_as_many_as_clients_send",
    "Fields of other servers": "server/test_other_servers.py::test_fields_that_are_refused",
    "What agents always send": "server/test_agent_bodies.py::test_sessions",
    "Commands take texts": "cli/test_texts_and_places.py::test_a_prompt_that_is_no_utf8",
    "Saved slots carry": "batching/test_batching_states.py::test_slots_are_saved_and_restored",
    "Models with MLA": "native/test_architectures.py::test_models_with_mla_load",
    "Without flash attention": "native/test_native.py::test_slots_that_lie_apart",
    "Errors show names from files": "common/test_words.py::test_control_characters_of_files",
    "References in schemas": "server/test_references.py::test_each_leads_to_its_own_definition",
    "What a strict schema is answered with": "server/test_schema_answers.py::test_random_schemas",
    "A client's own constants": "server/test_references.py::test_a_clients_texts_are_no_marks",
    "A stop string within a call": "server/test_tools.py::test_a_stop_string_within_a_call",
    "`max_tokens` and `stop` end": "server/test_server_answers.py::test_limits_count_tokens",
    "What clients send is read": "server/test_linear.py::test_bodies",
    "Clients take turns": "server/test_pauses.py::test_children_in_turn",
    "A client that sends": "server/test_server_parsers.py::test_a_client_that_asks_again_and_leaves",
    "Tracebacks in": "server/test_server_failures.py::test_nothing_of_a_request_is_in_the_log",
    "JSON that nests deep": "common/test_guarded_json.py::test_arguments_of_calls",
    "With the key as a browser's": "server/test_server_pressure.py::test_passwords_that_a_browser_sends",
    "Lists of prompts count": "server/test_server_records.py::test_prompts_of_a_list_count_in_full",
    "Logprobs, stopping criteria": "runtime/test_rows.py::test_rows_of_each_token",
    "What fails in a later row": "llama/test_failing_rows.py::test_the_tokens_before_it",
    "Saved states and slots belong": "llama/test_states.py::test_a_state_of_other_settings",
    "A process that has a `Batcher`": "batching/test_at_exit.py::test_a_process_ends",
    "A model's file may be moved": "llama/test_moved_files.py::test_files_that_are_gone",
    "Errors can be pickled": "common/test_errors.py::test_copies",
    "Another build of ggml": "runtime/test_library.py::test_another_ggml",
    "Closed standard streams": "cli/test_texts_and_places.py::test_streams_that_are_closed_or_full",
    "Files that are no model": "common/test_model_files.py::test_files_that_are_no_model",
    "Where Python has no module": "server/test_server_options.py::test_a_system_without_resource",
    "Seeds such as": "llama/test_seeds.py::test_a_given_seed_is_fixed",
    "`--help` shows each name": "cli/test_options.py::test_help_has_each_name_whole",
    "The pages install extras": "native/test_build.py::test_a_copy_in_place_of_the_checkout_is_mended",
    "Errors say `hf:OWNER/REPO`": "common/test_model_files.py::test_a_name_on_the_hub_without_hf",
    "`auto` knows a head": "heads/test_auto.py::test_auto_knows_a_head_by_what_it_is",
}


def quick_tests(session):
    """{file::test of tests/: whether a case of it is quick}, of what was collected."""
    found = {}
    for item in session.items:
        name = item.nodeid.removeprefix("tests/").partition("[")[0]
        found[name] = found.get(name, False) or not item.get_closest_marker("thorough")
    return found


@pytest.mark.parametrize("kind", ["promised", "mended"])
def test_each_promise_and_each_mended_fault_has_a_quick_test(request, kind):
    if kind == "promised":
        page, of = (ROOT / "README.md").read_text(), PROMISES
        lines = re.findall(r"^\| ([^|]+) \|", page.partition("## What it can do")[2], re.MULTILINE)
    else:
        page, of = (ROOT / "eagle3_llama/docs/changelog.md").read_text(), MENDED
        lines = re.findall(r"^- (.+)", page.partition("### Fixed")[2].partition("\n## ")[0], re.MULTILINE)
    assert lines and len(lines) == len(of), "a line of the page has no test here, or a test no line"
    tests = quick_tests(request.session)
    files = {name.partition("::")[0] for name in tests}
    for line in lines:
        [test] = [test for begin, test in of.items() if line.startswith(begin)]
        if test != NEEDS and test.partition("::")[0] in files:  # a run of some files has no others
            assert tests.get(test), f"{test} is no quick test: {line}"


# Files of which a quick run has no test, and why. What SLOW_FOLDERS has is not even collected.
DEVICE = "the library of a device, which is compiled for it"
WITHOUT = {
    "device/test_counts.py": DEVICE,
    "device/test_device_failures.py": DEVICE,
    "device/test_device_texts.py": DEVICE,
    "device/test_logits_stay.py": DEVICE,
    "device/test_places.py": DEVICE,
    "device/test_rpc_device.py": DEVICE,
    "device/test_widths.py": DEVICE,
    "device/test_other_folders.py": "the same, and whole runs of other folders",
    "device/test_ray_replica.py": "Ray",
    "native/test_stock.py": "the unpatched library",
    "server/test_server_page.py": "a browser",
    "server/test_server_page_failures.py": "a browser",
}


def test_each_file_has_a_quick_test(request):
    tests, having = quick_tests(request.session), {}
    for name, quick in tests.items():
        file = name.partition("::")[0]
        having[file] = having.get(file, False) or quick
    left = request.config.pluginmanager.get_plugin("tiers").only_thorough
    without = {path.relative_to(ROOT / "tests").as_posix() for path in left}
    without |= {
        file for file, quick in having.items() if not quick and not file.startswith(tuple(SLOW_FOLDERS))
    }
    assert without <= set(WITHOUT), "one quick test each, or a line in WITHOUT"
    assert all((ROOT / "tests" / file).is_file() and not having.get(file) for file in WITHOUT)
