"""Everything that can happen to a controller, in any order, against a model that keeps the whole history.

The model replays each tenant's history with what was really used. So at each reservation we know, by other means,
whether it had to be granted or refused, and how long the wait is.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.api import AdmissionAsk, Lane, Permit, Queued, QueuePolicy, Refusal, RefusalCode, Usage
from cluster.ledger import OWNER_LEASE_NS
from tests.cluster.makers import MINUTE, Replay, S, ask, assert_nothing_open, controller, tenant

TENANTS = {
    each.id: each
    for each in (
        tenant("tight", requests_per_minute=9, tokens_per_minute=700, concurrent_requests=3),
        tenant("bursty", weight=3, tokens_per_minute=2000, burst_s=20),
        tenant("free", weight=2),
    )
}
MODELS = ("m", "n")
OWNERS = ("ingress-1", "ingress-2")
POLICY = QueuePolicy(max_waiting_per_model=6, max_waiting_per_tenant=4, max_wait_s=20, aging_s=4)

tenants = st.sampled_from(sorted(TENANTS))
models = st.sampled_from(MODELS)
owners = st.sampled_from(OWNERS)
picks = st.integers(0, 1000)


@dataclass(frozen=True, kw_only=True)
class Open:
    """What the model knows of an open request. The numbers are those of its debits in the replays."""

    ask: AdmissionAsk
    owner: str
    tokens: int
    request_debit: int | None
    token_debit: int | None
    permit: Permit | None = None


class AdmissionMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.door = controller(*TENANTS.values(), models=MODELS, slots=3, kv_tokens=600, policy=POLICY)
        self.now_ns = 0
        self.names = (f"r{n}" for n in count())
        self.open: dict[str, Open] = {}
        self.heard_ns = dict.fromkeys(OWNERS, 0)
        self.used_tokens = dict.fromkeys(TENANTS, 0)
        self.requests: dict[str, Replay] = {}
        self.tokens: dict[str, Replay] = {}
        for each in TENANTS.values():
            limits = each.limits
            if limits.requests_per_minute is not None:
                self.requests[each.id] = Replay(limits.requests_per_minute, limits.burst_s)
            if limits.tokens_per_minute is not None:
                self.tokens[each.id] = Replay(limits.tokens_per_minute, limits.burst_s)

    # What happens.

    @rule(
        tenant=tenants,
        model=models,
        owner=owners,
        lane=st.sampled_from(Lane),
        prompt=st.integers(0, 300),
        output=st.none() | st.integers(0, 400),
        sequences=st.integers(1, 5),
    )
    def submit(
        self, tenant: str, model: str, owner: str, lane: Lane, prompt: int, output: int | None, sequences: int
    ) -> None:
        wanted = ask(
            next(self.names), tenant, model=model, lane=lane, prompt=prompt, output=output, sequences=sequences
        )
        before = self.door.snapshot(self.now_ns)
        outcome = self.door.submit(wanted, owner, self.now_ns)
        if isinstance(outcome, Refusal):
            assert self.door.snapshot(self.now_ns) == before
            self._check_refusal(wanted, outcome)
            return
        self.heard_ns[owner] = self.now_ns
        tokens = self.door.snapshot(self.now_ns)
        reserved = sum(t.reserved_tokens for t in tokens.tenants) - sum(t.reserved_tokens for t in before.tenants)
        self._reserve(wanted, owner, reserved)
        if isinstance(outcome, Permit):
            assert outcome.reserved_tokens == reserved
            self._granted(outcome)
        else:
            assert isinstance(outcome, Queued)

    @rule()
    def dispatch(self) -> None:
        for decision in self.door.dispatch(self.now_ns):
            if isinstance(decision, Permit):
                self._granted(decision)
            else:
                assert self.open[decision.request_id].permit is None
                assert decision.code in (RefusalCode.NO_CAPACITY, RefusalCode.KV_CAPACITY_EXCEEDED)
                self._settle(decision.request_id, None)

    @precondition(lambda self: self.open)
    @rule(pick=picks)
    def withdraw(self, pick: int) -> None:
        request_id = self._pick(pick)
        assert self.door.withdraw(request_id, self.now_ns)
        self._settle(request_id, None)
        assert not self.door.withdraw(request_id, self.now_ns)

    @precondition(lambda self: any(each.permit for each in self.open.values()))
    @rule(pick=picks, completion=st.integers(0, 500))
    def close(self, pick: int, completion: int) -> None:
        running = sorted(request_id for request_id, each in self.open.items() if each.permit)
        request_id = running[pick % len(running)]
        usage = Usage(prompt_tokens=self.open[request_id].ask.prompt_tokens, completion_tokens=completion)
        assert self.door.close(request_id, usage, self.now_ns)
        self._settle(request_id, usage)
        assert not self.door.close(request_id, usage, self.now_ns)

    @precondition(lambda self: self.open)
    @rule(pick=picks, owner=owners)
    def message_comes_twice(self, pick: int, owner: str) -> None:
        request_id = self._pick(pick)
        known = self.open[request_id]
        before = self.door.snapshot(self.now_ns)
        if known.permit:
            self.door.reopen(known.permit, owner, self.now_ns)
        assert isinstance(self.door.submit(known.ask, owner, self.now_ns), Permit if known.permit else Queued)
        assert self.door.snapshot(self.now_ns) == before
        self.open[request_id] = replace(known, owner=owner)
        self.heard_ns[owner] = self.now_ns

    @rule(wait_ns=st.sampled_from([1, S, 3 * S, 7 * S, 15 * S, 40 * S]) | st.integers(0, MINUTE))
    def wait(self, wait_ns: int) -> None:
        self.now_ns += wait_ns

    @rule(owner=owners)
    def renew(self, owner: str) -> None:
        self.door.renew(owner, self.now_ns)
        self.heard_ns[owner] = self.now_ns

    @rule()
    def expire(self) -> None:
        silent = {owner for owner, heard_ns in self.heard_ns.items() if self.now_ns - heard_ns >= OWNER_LEASE_NS}
        expected = {request_id for request_id, each in self.open.items() if each.owner in silent}
        assert set(self.door.expire(self.now_ns)) == expected
        for request_id in expected:
            known = self.open[request_id]
            prompt_only = Usage(prompt_tokens=known.ask.prompt_tokens, completion_tokens=0)
            self._settle(request_id, prompt_only if known.permit else None)

    @rule(model=models, number=st.integers(1, 2), slots=st.integers(0, 4), kv_tokens=st.integers(0, 900))
    def replica_reports(self, model: str, number: int, slots: int, kv_tokens: int) -> None:
        self.door.report_replica(model, f"{model}-{number}", slots, kv_tokens, self.now_ns)

    @rule(model=models, number=st.integers(1, 2))
    def replica_dies(self, model: str, number: int) -> None:
        self.door.forget_replica(model, f"{model}-{number}")

    # What must hold.

    @invariant()
    def counts_agree(self) -> None:
        self.door.check_integrity()
        snapshot = self.door.snapshot(self.now_ns)
        assert sum(model.permits_open for model in snapshot.models) == sum(
            each.permit is not None for each in self.open.values()
        )
        for account in snapshot.tenants:
            mine = [each for each in self.open.values() if each.ask.tenant == account.tenant]
            assert account.open_reservations == len(mine)
            assert account.reserved_tokens == sum(each.tokens for each in mine)
            assert account.used_tokens == self.used_tokens[account.tenant]
            limit = TENANTS[account.tenant].limits.concurrent_requests
            assert limit is None or len(mine) <= limit

    @invariant()
    def windows_stand_where_the_history_says(self) -> None:
        for tenant_id in TENANTS:
            limits = self.door.limits(tenant_id, self.now_ns)
            for replays, status in ((self.requests, limits.requests), (self.tokens, limits.tokens)):
                assert (status is None) == (tenant_id not in replays)
                if status is not None:
                    replay = replays[tenant_id]
                    assert status.remaining == max(0, (replay.capacity - replay.missing(self.now_ns)) // 1)

    def teardown(self) -> None:
        for request_id, known in list(self.open.items()):
            self.door.close(
                request_id, Usage(prompt_tokens=1, completion_tokens=1) if known.permit else None, self.now_ns
            )
        self.door.check_integrity()
        assert_nothing_open(self.door.snapshot(self.now_ns))

    # How the model keeps its books.

    def _pick(self, pick: int) -> str:
        return sorted(self.open)[pick % len(self.open)]

    def _reserve(self, wanted: AdmissionAsk, owner: str, tokens: int) -> None:
        request_debit = token_debit = None
        if wanted.tenant in self.requests:
            assert self.requests[wanted.tenant].fits(1, self.now_ns)
            request_debit = self.requests[wanted.tenant].debit(1, self.now_ns)
        if wanted.tenant in self.tokens:
            assert self.tokens[wanted.tenant].fits(tokens, self.now_ns)
            token_debit = self.tokens[wanted.tenant].debit(tokens, self.now_ns)
        self.open[wanted.request_id] = Open(
            ask=wanted, owner=owner, tokens=tokens, request_debit=request_debit, token_debit=token_debit
        )

    def _granted(self, permit: Permit) -> None:
        known = self.open[permit.request_id]
        assert known.permit is None
        self.open[permit.request_id] = replace(known, permit=permit)
        capacity = self.door._gates[permit.model].capacity
        promised = capacity.promised_down_to(permit.lane)
        assert promised.slots <= capacity.slots
        assert promised.kv_tokens <= capacity.kv_tokens

    def _settle(self, request_id: str, usage: Usage | None) -> None:
        known = self.open.pop(request_id)
        total = usage.total_tokens if usage else 0
        self.used_tokens[known.ask.tenant] += total
        if known.request_debit is not None and usage is None:
            self.requests[known.ask.tenant].correct(known.request_debit, 0)
        if known.token_debit is not None:
            self.tokens[known.ask.tenant].correct(known.token_debit, min(known.tokens, total))
            self.tokens[known.ask.tenant].debit(max(0, total - known.tokens), self.now_ns)

    def _check_refusal(self, wanted: AdmissionAsk, refused: Refusal) -> None:
        """The limit that was named did bind, and stops binding when the client is told to come back."""
        assert refused.request_id == wanted.request_id
        assert refused.retry_after_s is None or refused.retry_after_s >= 1
        later_ns = self.now_ns + (refused.retry_after_s or 0) * S
        expected = 256 * wanted.num_sequences
        asked = wanted.prompt_tokens + (expected if wanted.max_output_tokens is None else wanted.max_output_tokens)
        match refused.code:
            case RefusalCode.REQUESTS_PER_MINUTE:
                assert not self.requests[wanted.tenant].fits(1, self.now_ns)
                assert self.requests[wanted.tenant].fits(1, later_ns)
            case RefusalCode.TOKENS_PER_MINUTE:
                replay = self.tokens[wanted.tenant]
                if wanted.max_output_tokens is None:
                    asked = min(asked, int(replay.capacity))
                assert not replay.fits(asked, self.now_ns)
                assert replay.fits(asked, later_ns)
            case RefusalCode.CONCURRENT_REQUESTS:
                mine = [each for each in self.open.values() if each.ask.tenant == wanted.tenant]
                assert len(mine) == TENANTS[wanted.tenant].limits.concurrent_requests
            case RefusalCode.EXCEEDS_LIMIT:
                assert asked > self.tokens[wanted.tenant].capacity
                assert refused.retry_after_s is None
            case RefusalCode.QUEUE_FULL:
                waiting = [
                    each.ask for each in self.open.values() if each.ask.model == wanted.model and not each.permit
                ]
                mine_waiting = [each for each in waiting if each.tenant == wanted.tenant]
                assert len(waiting) == 6 or len(mine_waiting) == 4
            case RefusalCode.KV_CAPACITY_EXCEEDED:
                assert refused.retry_after_s is None
            case RefusalCode.NO_CAPACITY:
                raise AssertionError("no time has passed")


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
