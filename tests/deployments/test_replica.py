"""A replica without Ray, on the simulated executor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from deployments.admission_wire import AdmissionUnreachableError, CapacityReport
from deployments.replica import ModelReplica, ReplicaSettings, max_ongoing_requests, num_slots
from engine.api import FinishReason, GenerateRequest, RequestRefusedError, SamplingParams
from engine.config import EngineConfig, ExecutorKind

pytestmark = pytest.mark.model


class Reports:
    """Takes capacity reports; the first one finds nobody."""

    def __init__(self) -> None:
        self.taken: list[CapacityReport] = []
        self.num_lost = 0
        self.arrived = asyncio.Event()

    async def __call__(self, report: CapacityReport) -> None:
        if self.num_lost == 0:
            self.num_lost = 1
            raise AdmissionUnreachableError("not there yet")
        self.taken.append(report)
        self.arrived.set()


def request(request_id: str, max_tokens: int) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(request_id=request_id, prompt_token_ids=(5, 6, 7), sampling=sampling)


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    monkeypatch.setattr("deployments.replica.REPORT_PERIOD_S", 0.001)
    return Reports()


@pytest.fixture
async def replica(smollm2: Path, reports: Reports) -> AsyncIterator[ModelReplica]:
    engine = EngineConfig(model=str(smollm2), executor=ExecutorKind.SIMULATED, max_num_seqs=8, num_kv_blocks=600)
    replica = ModelReplica.__new__(ModelReplica)
    start: Any = replica.__init__  # type: ignore[misc]  # as Serve does: the constructor is a coroutine
    await start(ReplicaSettings(model="tiny", engine=engine, loopback_only=False), reports, "r1")
    yield replica
    await replica.drain(0.0)


async def test_it_streams_what_the_engine_generates(replica: ModelReplica) -> None:
    deltas = [delta async for delta in replica.generate(request("a", 5))]

    assert sum(len(delta.token_ids) for delta in deltas) == 5
    assert [delta.finish_reason for delta in deltas][-1] is FinishReason.LENGTH


async def test_closing_the_stream_ends_the_request_in_the_engine(replica: ModelReplica) -> None:
    async with aclosing(replica.generate(request("a", 4000))) as deltas:
        await anext(deltas)

    generated = await replica.cancel("a")
    stats = (await replica.report(0)).stats

    assert generated is not None
    assert 0 < generated < 4000
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks) == (0, 0, 0)


async def test_a_report_has_as_many_of_the_last_steps_as_were_asked_for(replica: ModelReplica) -> None:
    async for _ in replica.generate(request("a", 5)):
        pass

    steps = {asked: (await replica.report(asked)).steps for asked in (0, 2, 100)}

    assert [step.step for step in steps[100]] == [1, 2, 3, 4, 5]
    assert steps[2] == steps[100][-2:]
    assert steps[0] == ()


async def test_what_the_engine_refuses_is_raised(replica: ModelReplica) -> None:
    with pytest.raises(RequestRefusedError):
        await anext(replica.generate(request("a", 1_000_000)))


async def test_a_request_that_it_does_not_know_has_no_count(replica: ModelReplica) -> None:
    assert await replica.cancel("never-heard-of") is None


async def test_it_goes_on_reporting_its_capacity_when_a_report_is_lost(replica: ModelReplica, reports: Reports) -> None:
    await reports.arrived.wait()

    assert reports.num_lost == 1
    assert reports.taken[0] == CapacityReport(replica="r1", model="tiny", slots=9, kv_tokens=9600)
    await replica.check_health()


def test_the_read_ahead_is_an_eighth_of_the_batch_and_at_least_one() -> None:
    assert [num_slots(seqs) for seqs in (1, 8, 9, 32)] == [2, 9, 11, 36]


def test_serves_own_bound_is_above_what_admission_lets_in() -> None:
    assert all(max_ongoing_requests(seqs) > num_slots(seqs) for seqs in (1, 8, 256))
