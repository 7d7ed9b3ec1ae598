"""A job: the states that it goes through, the time that it spends in each, and why it has to end."""

import pytest

from eagle3_llama import EagleParams
from eagle3_llama.batching.job import HAS_WORK, Job, JobState, JobTimes, in_turn


@pytest.fixture
def job():
    return Job([1, 2, 3], None, EagleParams(0), read_ahead_to=2, room=10, max_tokens=5, deadline=None)


def test_a_job_goes_through_its_states(job):
    seen = [job.state]
    job.times.started = job.times.queued + 1.0
    for job.prompt_at in (0, 2, 3):
        seen.append(job.state)
    for job.n_tokens in (1, 2):
        seen.append(job.state)
    job.read_ahead_to = 5  # its reader asks for more
    seen.append(job.state)
    job.times.ended = job.times.started + 1.0
    seen.append(job.state)
    names = "QUEUED PROMPT PROMPT GENERATING GENERATING PAUSED GENERATING ENDED"
    assert [state.name for state in seen] == names.split()
    assert {JobState.QUEUED, JobState.PAUSED, JobState.ENDED} == set(JobState) - set(HAS_WORK)


def test_an_end_needs_a_reason(job):
    assert job.end_reason(1e9) is None
    job.deadline = 5.0
    assert job.end_reason(4.9) is None and job.end_reason(5.0) == "deadline"
    job.cancelled = "shutdown"
    assert job.end_reason(5.0) == "shutdown"


@pytest.mark.parametrize(
    ("times", "spans"),
    [
        ((1.0, 3.0, 6.0, 10.0), (2.0, 3.0, 4.0)),
        ((1.0, 3.0, None, 10.0), (2.0, 7.0, 0.0)),  # ended within its prompt
        ((1.0, None, None, 10.0), (9.0, 0.0, 0.0)),  # never had a slot
    ],
)
def test_the_time_of_each_state(times, spans):
    assert tuple(JobTimes(*times).spans().values()) == spans


def test_clients_get_slots_in_turn():
    """One with many requests does not keep another waiting for all of them. Its own keep their order."""
    made = lambda client: Job([1], None, EagleParams(0), 1, 10, 5, deadline=None, client=client)
    waiting, running = [made(c) for c in "aaaabbc"], [made(c) for c in "aab"]
    order = in_turn(waiting, running)
    assert "".join(job.client for job in order) == "cbabaaa"
    assert [job for job in order if job.client == "a"] == waiting[:4]
    assert in_turn(waiting[:4], []) == waiting[:4] and in_turn([], running) == []
