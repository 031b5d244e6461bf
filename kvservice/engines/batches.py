"""The inputs of the model for a scheduled batch, and the batch's report from the logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kvservice.client import BatchReport, EngineBatch, Step
from kvservice.engines.requests import EngineRequest
from kvservice.engines.samples import Row, Sample, failure
from kvservice.engines.sampling import Choice, change_logits, choose
from kvservice.errors import InvalidArgumentError

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
