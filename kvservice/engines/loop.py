"""The loop of an engine: schedule, run, sample, report."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np
import torch

from kvservice.client import BatchReport, EngineBatch, Step
from kvservice.engines.host import DAEMON_LOST, EngineHost
from kvservice.engines.requests import EngineRequest, abort, aborted_ids, remaining, scheduled, submit
from kvservice.engines.samples import Row, Sample, failure
from kvservice.engines.sampling import Choice, change_logits, choose, may_speculate
from kvservice.errors import InternalError, InvalidArgumentError, KVServiceError

_logger: Final = logging.getLogger(__name__)
_IDLE_S: Final = 0.002


class Speculator(Protocol):
    """Proposes tokens that follow samples."""

    def propose(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Return the proposals of each sample, at most `num_tokens` each; the fewer, the surer it is."""

    def forget(self, samples: Iterable[Sample]) -> None:
        """Drop what is kept of samples that are over."""

    def reset(self) -> None:
        """Drop everything that is kept."""


class Recorder(Protocol):
    """Gets what a restarted engine must know. See Journal in core.py."""

    def opened(self, token: bytes) -> None: ...

    def added(self, requests: Sequence[EngineRequest]) -> None: ...

    def refused(self, requests: Sequence[EngineRequest]) -> None:
        """Forget requests that were added, but not queued."""

    def ended(self, requests: Sequence[EngineRequest]) -> None:
        """Record the samples of these requests that have ended. It is called before their ends are reported."""


class EngineLoop:
    """Runs requests in one thread. `live` are those that are not over, by request id. `left` says that it was
    interrupted and has left them to the engine that goes on with its record.

    With `ahead`, the next batch is made while the model runs, before the tokens of this one are known.
    """

    def __init__(
        self,
        host: EngineHost,
        speculator: Speculator | None = None,
        recorder: Recorder | None = None,
        *,
        ahead: bool = False,
    ) -> None:
        self.live: dict[int, EngineRequest] = {}
        self.left = False
        self.batch: EngineBatch[Step] | None = None
        self._host, self._speculator, self._recorder = host, speculator, recorder
        self._samples: dict[int, tuple[Sample, EngineRequest]] = {}
        self._reports: list[BatchReport] = []
        self._aborts: list[EngineRequest] = []
        # Sequences that the last report has ended, whose rows of a batch made ahead get no tokens.
        self._ended: frozenset[int] = frozenset()
        self._next: Future[EngineBatch[Step]] | None = None
        self._retry = False
        self._thread = ThreadPoolExecutor(1, "kvservice-schedule") if ahead else None

    @property
    def num_unfinished(self) -> int:
        return sum(not request.finished for request in self.live.values())

    def add(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Queue all requests, or none if one is refused. If the daemon was restarted, all live requests are queued
        again: returns those that it refuses now, as `step` does.

        Raises the daemon's errors; OutOfBlocksError with `never` for a request that the pool can never hold.
        """
        if not self._host.usable:
            self._reopen()
        if self._recorder is not None:
            self._recorder.added(requests)
        try:
            submit(self._host.scheduler, scheduled(self._host.model, requests), self._host.session.info)
        except DAEMON_LOST:
            self._keep(requests)
            return self._recover()
        except Exception:  # any error refuses the requests
            if self._recorder is not None:
                self._recorder.refused(requests)
            raise
        except BaseException:
            self.left = self._recorder is not None
            raise
        self._keep(requests)
        return []

    def adopt(self, requests: Sequence[EngineRequest], known: Collection[int]) -> None:
        """Go on with requests that the daemon's scheduler has already, under the ids `known`. The batch that was in
        flight is opened again."""
        self._keep(requests, known)
        self._retry = True

    def resubmit(self, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """Queue the rest of requests that the daemon does not know, with their generated tokens as prompts. A request
        that it refuses ends with its error, and the others go on. Returns the refused ones."""
        try:
            self._resubmit(requests)
            return []
        except DAEMON_LOST:
            raise
        except KVServiceError:  # the daemon queued none of them: find those that it refuses
            return [request for request in requests if self._is_refused(request)]

    def _resubmit(self, requests: Sequence[EngineRequest]) -> None:
        submit(self._host.scheduler, remaining(self._host.model, requests), self._host.session.info)
        self._keep(requests)

    def _is_refused(self, request: EngineRequest) -> bool:
        """Queue the rest of one request. Returns whether it is refused, and thereby over."""
        try:
            self._resubmit([request])
            return False
        except DAEMON_LOST:
            raise
        except KVServiceError as error:
            request.end("error", error)
            self._end([request])
            return True

    def abort(self, request: EngineRequest) -> None:
        """End a request now. The daemon frees it with the next step."""
        if request.request_id in self.live and not request.finished:
            self._aborts.append(request)
            request.end("abort")

    def step(self) -> list[EngineRequest]:
        """Run one step. Returns the requests that got tokens or ended.

        If the daemon was restarted or has lost the session, the requests are queued again, with their generated tokens
        as prompts, whose K/V are in the prefix cache if the daemon has kept them; those that it refuses now end with
        the error. Other errors end all requests, or, with a recorder, leave them; they are raised.
        """
        try:
            with torch.inference_mode():
                return self._step()
        except DAEMON_LOST:
            return self._recover()
        except BaseException as error:
            if self._recorder is None:
                self._drop(error)
            raise

    def interrupt(self, requests: Sequence[EngineRequest]) -> None:
        """Abort requests, and let the daemon free them. With a recorder, leave them to the next engine. It raises no
        errors, since an exception of the caller is on its way."""
        self.left = self._recorder is not None
        if self.left:
            return
        for request in requests:
            self.abort(request)
        try:
            while self.live:
                self.step()
        except Exception as error:  # the daemon frees them with the session, if not before
            _logger.warning("interrupted requests could not be ended: %s", error)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _step(self) -> list[EngineRequest]:
        ended = self._send_aborts()
        batch = self.batch = self._take_batch(ended)
        if batch.step is None:
            if not ended and self.num_unfinished:
                time.sleep(_IDLE_S)
            return ended
        inputs = inputs_of(batch, self._samples, self._ended)
        self._schedule_ahead()
        with self._host.noticing_restarts():
            logits = self._host.runner.run(batch.step, inputs.token_ids, inputs.positions)
        report, changed = sample_batch(batch, inputs, logits, self._samples)
        self._ended = frozenset(report.finished)
        if report.finished and self._recorder is not None:
            self._recorder.ended(changed)
        self._propose([self._samples[one][0] for one in inputs.sampled], report)
        over = [request for request in changed if request.finished]
        if over:
            self._end(over)
        return ended + [request for request in changed if request not in ended]

    def _take_batch(self, ended: list[EngineRequest]) -> EngineBatch[Step]:
        """Return the batch made ahead, if it has a step, or report and make one. Adds to `ended` the requests that the
        daemon's scheduler has aborted."""
        if self._next is not None:
            future, self._next = self._next, None
            batch = future.result()
            ended += self._note_ends(batch)
            if batch.step is not None:
                return batch
        self._ended = frozenset()
        reports, retry = self._reports, self._retry
        batch = self._host.scheduler.schedule(reports, retry=retry)
        self._reports, self._retry = [], False
        ended += self._note_ends(batch)
        return batch

    def _note_ends(self, batch: EngineBatch[Step]) -> list[EngineRequest]:
        """Drop requests that are over in the daemon. Returns those that its scheduler has aborted, which end with their
        errors."""
        failed = list[EngineRequest]()
        for request_id, error in batch.failed.items():
            _, request = self._samples[request_id]
            if not request.finished:
                request.end("error", error)
                failed.append(request)
        self.forget(batch.finished)
        self._end(failed)
        return failed

    def _schedule_ahead(self) -> None:
        """Make the next batch while this one runs, and deliver the report of the one before."""
        if self._thread is not None and self._speculator is None:
            reports, self._reports = self._reports, []
            self._next = self._thread.submit(self._host.scheduler.schedule, reports, ahead=True)

    def _propose(self, sampled: list[Sample], report: BatchReport) -> None:
        running = [sample for sample in sampled if not sample.finished and may_speculate(sample)]
        if self._speculator is not None and running:
            for sample, proposals in zip(running, self._speculator.propose(running), strict=True):
                room = max(0, sample.max_tokens - sample.num_generated - 1)
                refused = (at for at, token in enumerate(proposals) if token in sample.unusable_ids)
                sample.proposals = proposals[: min(room, next(refused, room))]
            report = report_proposals(report, sampled)
        self._reports.append(report)

    def _end(self, over: Sequence[EngineRequest]) -> None:
        """Handle the ends of requests, once each."""
        over = [request for request in over if not request.recorded]
        for request in over:
            request.recorded = True
        if self._recorder is not None and over:
            self._recorder.ended(over)
        self._aborts += [request for request in over if request.error is not None]
        if self._speculator is not None:
            self._speculator.forget(sample for request in over for sample in request.samples)

    def _send_aborts(self) -> list[EngineRequest]:
        """Tell the daemon which requests the engine has ended. Returns those that their user has aborted."""
        aborts, self._aborts = self._aborts, []
        ids = [one for request in aborts for one in aborted_ids(request) if one in self._samples]
        if ids:
            self.forget(abort(self._host.scheduler, ids, self._host.session.info))
        by_user = [request for request in aborts if request.error is None]
        self._end(by_user)
        return by_user

    def _keep(self, requests: Sequence[EngineRequest], known: Collection[int] = ()) -> None:
        """Note what the daemon's scheduler has from now on. It never says that a sample is finished which it did not
        get, such as one that was finished before the others were queued again."""
        for request in requests:
            self.live[request.request_id] = request
            for sample in request.samples:
                if request.grouped or not sample.finished or sample.sequence_id in known:
                    self._samples[sample.sequence_id] = sample, request

    def forget(self, finished: Iterable[int]) -> None:
        """Drop requests that are over in the daemon."""
        for request_id in finished:
            _, request = self._samples[request_id]
            for sample in request.samples if request.grouped else [self._samples[request_id][0]]:
                del self._samples[sample.sequence_id]
            if not any(sample.sequence_id in self._samples for sample in request.samples):
                del self.live[request.request_id]

    def _recover(self) -> list[EngineRequest]:
        """Go on with a new scheduler. If there is none, end all requests and raise the error. Returns the requests that
        the daemon refuses now."""
        requests = self._start_again()
        while True:
            try:
                self._reopen()
            except Exception as error:  # no request can go on without a session
                if self._recorder is None:
                    self._end_all(requests, error)
                raise
            try:
                self.resubmit([request for request in requests if not request.finished])
                return [request for request in requests if request.finished]
            except DAEMON_LOST:
                self._start_again()

    def _drop(self, error: BaseException) -> None:
        """End all requests after an error of the engine, and go on in a new session without them. It raises no errors:
        without a new session, the next request tries to open one, or gets the reason why there is none."""
        try:
            self._end_all(self._start_again(), error)
            self._reopen()
        except Exception as after:
            error.add_note(f"and the engine could not go on: {after!r}")

    def _end_all(self, requests: Sequence[EngineRequest], error: BaseException) -> None:
        reason = error if isinstance(error, Exception) else InternalError(f"the engine's step was ended by {error!r}")
        for request in requests:
            request.end("error", reason)
        self._end(requests)
        self._aborts.clear()

    def _reopen(self) -> None:
        self._host.reopen()
        if self._recorder is not None:
            self._recorder.opened(self._host.session.token)

    def _start_again(self) -> list[EngineRequest]:
        """Forget the batches and requests. Returns the requests that are not over."""
        if self._next is not None:
            wait([self._next])
        requests = [request for request in self.live.values() if not request.finished]
        self._next, self.batch, self._retry = None, None, False
        self.live.clear()
        self._samples.clear()
        self._reports.clear()
        if self._speculator is not None:
            self._speculator.reset()
        return requests


# ---- the inputs of the model for a scheduled batch, and the batch's report from the logits


# The live samples and their requests, by sequence id.
Samples = Mapping[int, tuple[Sample, EngineRequest]]


@dataclass(frozen=True)
class BatchInputs:
    """Inputs of the model for a batch.

    `token_ids` int64[num_tokens] are the tokens of the step; `positions` int64[m] are those whose logits are needed, as
    indices into it. `rows` says of which samples they are, and `counts` how many rows each sampled sequence has: one,
    and one for each of its proposals.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    rows: list[Row]
    counts: list[int]
    sampled: list[int]


def inputs_of(batch: EngineBatch[Step], samples: Samples, ended: frozenset[int]) -> BatchInputs:
    """Return the inputs of a batch with a step. `ended`: sequences that the report before has ended, which get no
    tokens."""
    assert batch.step is not None, "the caller has checked that the batch has a step"
    query_lens, context_lens = batch.step.query_lens.tolist(), batch.step.context_lens.tolist()
    token_ids: list[int] = []
    for sequence_id, query, context in zip(batch.sequence_ids.tolist(), query_lens, context_lens, strict=True):
        token_ids += samples[sequence_id][0].tokens_of(context - query, context)
    ends = np.cumsum(query_lens).tolist()
    rows, counts, positions, sampled = list[Row](), list[int](), list[int](), list[int]()
    for sequence_id, row in zip(batch.sampled.tolist(), batch.sampled_rows.tolist(), strict=True):
        if sequence_id in ended:
            continue
        sample = samples[sequence_id][0]
        num_proposed = query_lens[row] - 1 if row < batch.num_decodes else 0
        for accepted in range(num_proposed + 1):
            positions.append(ends[row] - 1 - num_proposed + accepted)
            rows.append(Row(sample, tuple(sample.proposals[:accepted])))
        counts.append(num_proposed + 1)
        sampled.append(sequence_id)
    return BatchInputs(torch.tensor(token_ids), torch.tensor(positions, dtype=torch.long), rows, counts, sampled)


def sample_batch(
    batch: EngineBatch[Step], inputs: BatchInputs, logits: torch.Tensor, samples: Samples
) -> tuple[BatchReport, list[EngineRequest]]:
    """Choose tokens from logits `[m, vocabulary]`, and give them to their samples.

    Returns the report, without proposals, and the requests that got tokens. Where something that a request brought
    raises, such as its logits processor or its tokenizer, the request is ended with this error, and no other notices.
    The token that is reported for an ended sample is 0.
    """
    firsts = dict(zip(inputs.sampled, np.cumsum([0, *inputs.counts]).tolist(), strict=False))
    requests = {samples[one][1].request_id: samples[one][1] for one in inputs.sampled}
    with_beams = [request for request in requests.values() if request.beams is not None]
    for request in with_beams:
        _step_beams(request, logits, inputs.rows, [firsts[sample.sequence_id] for sample in request.samples])
    choice, at = Choice([]), 0
    of_samples = [
        firsts[sequence_id] + accepted
        for sequence_id, count in zip(inputs.sampled, inputs.counts, strict=True)
        if samples[sequence_id][1].beams is None
        for accepted in range(count)
    ]
    if of_samples:  # beams have run their logits processors above, which may have a state
        choice = choose(logits[of_samples] if with_beams else logits, [inputs.rows[row] for row in of_samples])
    tokens, counts, parents, finished = list[int](), list[int](), list[int](), list[int]()
    for sequence_id, count in zip(inputs.sampled, inputs.counts, strict=True):
        sample, request = samples[sequence_id]
        if request.beams is not None:
            accepted = [sample.last_token]
        else:
            accepted = _accept(sample, request, choice, at, count)
            at += count
        tokens += accepted
        counts.append(len(accepted))
        parents.append(request.samples[sample.parent].sequence_id)
        if sample.finished:
            finished.append(sequence_id)
    report = BatchReport(
        batch.number,
        tokens,
        num_tokens=counts if len(tokens) > len(counts) else None,
        parents=parents if with_beams else None,
        finished=finished,
    )
    return report, list(requests.values())


def _accept(sample: Sample, request: EngineRequest, choice: Choice, first: int, count: int) -> list[int]:
    """Give a sample the tokens of its rows, up to the first that is not the one proposed. Returns them."""
    proposals, sample.proposals = sample.proposals, []
    taken: list[int] = []
    for at in range(count):
        if first + at in choice.errors:
            request.end("error", choice.errors[first + at])
        if sample.finished:
            break
        taken.append(choice.token_ids[first + at])
        try:
            sample.add(taken[-1], choice.logprobs.get(first + at))
        except BaseException as error:  # foreign code
            request.end("error", failure(f"the tokenizer, at token {taken[-1]}", error))
            break
        if at + 1 == count or proposals[at] != taken[-1]:
            break
    request.num_proposed += count - 1
    request.num_accepted += max(0, len(taken) - 1)
    return taken or [0]


def _step_beams(request: EngineRequest, logits: torch.Tensor, rows: Sequence[Row], indices: list[int]) -> None:
    """Continue the beams of a request, given the index of each one's row."""
    beams = request.beams
    assert beams is not None, "the caller has checked that the request has beams"
    errors: dict[int, Exception] = {}
    logprobs = change_logits(logits[indices].float().log_softmax(-1), [rows[index] for index in indices], errors)
    if errors:
        request.end("error", next(iter(errors.values())))
    if request.finished:
        return
    try:
        tokens, parents = beams.step(logprobs)
        if beams.over:
            request.end_beams()
            return
    except BaseException as error:  # foreign code, or scores with which no beam can go on
        request.end("error", failure("the beam search, or the tokenizer at its end", error))
        return
    unusable = request.samples[0].unusable_ids.intersection(tokens)
    if unusable:
        said = f"{min(unusable)} is padding, which has no position in this model"
        request.end("error", InvalidArgumentError(said, field="token_ids"))
        return
    for sample, parent, generated in zip(request.samples, parents, beams.generated, strict=True):
        sample.token_ids[sample.prompt_length :] = generated
        sample.parent = parent


def report_proposals(report: BatchReport, sampled: Sequence[Sample]) -> BatchReport:
    """Return the report with the proposals of the samples, which are in the order of its rows."""
    counts = [len(sample.proposals) for sample in sampled]
    if not any(counts):
        return report
    tokens = [token for sample in sampled for token in sample.proposals]
    return replace(report, proposals=tokens, num_proposed=counts)
