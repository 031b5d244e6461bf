"""A request of the engine: its prompt, its samples or beams, and its output."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from kvservice.engines.beams import BeamSearch
from kvservice.engines.outputs import CompletionOutput, RequestOutput
from kvservice.engines.params import SamplingParams
from kvservice.engines.processors import own_processors
from kvservice.engines.samples import Sample
from kvservice.engines.sampling import stream_of


@dataclass(frozen=True)
class Prompt:
    """A checked request. `max_tokens` is the most tokens of each output; `seed` is that of the parameters or drawn."""

    request_id: int
    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    seed: int


@dataclass(eq=False)
class EngineRequest:
    """State of a request. Sample i is sequence `request_id` + i in the daemon.

    `beams` is the state of its beam search, whose running beams are the samples. `grouped` says that the scheduler
    knows all samples as one request; after the daemon lost its state, each sample is a request of its own.
    """

    prompt: Prompt
    samples: list[Sample]
    beams: BeamSearch | None
    grouped: bool = True
    recorded: bool = False
    error: Exception | None = None
    num_proposed: int = 0
    num_accepted: int = 0

    @classmethod
    def of(cls, prompt: Prompt, eos_ids: Collection[int], tokenizer: PreTrainedTokenizerBase | None) -> EngineRequest:
        params = prompt.params
        samples = [
            Sample(
                prompt.request_id + index,
                index,
                list(prompt.token_ids),
                params,
                prompt.max_tokens,
                eos_ids,
                stream_of(prompt.seed, index),
                tokenizer,
                own_processors(params.logits_processors),
            )
            for index in range(params.width)
        ]
        request = cls(prompt, samples, None)
        request.restart_beams()
        return request

    @property
    def request_id(self) -> int:
        return self.prompt.request_id

    @property
    def finished(self) -> bool:
        if self.error is not None:
            return True
        if self.beams is not None and self.beams.over:
            return True
        return all(sample.finished for sample in self.samples)

    def restart_beams(self) -> None:
        """Begin the beam search from the prompt, if this is one."""
        params = self.prompt.params
        if params.beam_width == 1:
            return
        for sample in self.samples:
            del sample.token_ids[sample.prompt_length :]
        self.beams = BeamSearch(
            params.beam_width,
            self.prompt.max_tokens,
            self.samples[0].ending_ids,
            params.length_penalty,
            params.early_stopping,
        )

    def end(self, reason: str, error: Exception | None = None) -> None:
        """End the samples that still run."""
        self.error = error
        for sample in self.samples:
            sample.abort(reason)

    def output(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            self.prompt.text,
            self.prompt.token_ids,
            tuple(self._outputs()),
            self.finished,
            self.error,
            self.num_proposed,
            self.num_accepted,
        )

    def _outputs(self) -> list[CompletionOutput]:
        if self.beams is not None:
            return self._beam_outputs(self.beams)
        outputs = [sample.output() for sample in self.samples]
        if len(outputs) > self.prompt.params.n:
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        return outputs[: self.prompt.params.n]

    def _beam_outputs(self, beams: BeamSearch) -> list[CompletionOutput]:
        """Return the complete beams, best first. There are none while the search goes on."""
        if not beams.over:
            reason = self.samples[0].finish_reason
            return [CompletionOutput(at, "", (), finish_reason=reason) for at in range(self.prompt.params.n)]
        return [
            self._beam_output(at, beam.token_ids, beam.logprob)
            for at, beam in enumerate(beams.complete[: self.prompt.params.n])
        ]

    def _beam_output(self, index: int, token_ids: tuple[int, ...], logprob: float) -> CompletionOutput:
        sample = self.samples[0].restarted(index)
        for token_id in token_ids:
            sample.add(token_id)
        output = sample.output()
        return CompletionOutput(index, output.text, token_ids, logprob, None, output.finish_reason, output.stop_reason)
