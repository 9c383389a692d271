"""The recipe of `areal-lite train`: typed, checked, and complete before anything starts."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import model_validator

from areal_lite.config import sections
from areal_lite.config.data import DataConfig
from areal_lite.config.plugins import known_names
from areal_lite.config.presets import ObjectiveConfig, expand_preset
from areal_lite.config.reading import parse_section, read_recipe
from areal_lite.config.section import Section
from areal_lite.config.suggestion import suggestion
from areal_lite.config.verifier import VerifierConfig

PARITY_LIMITS = {"float32": 0.003, "bfloat16": 0.13, "experts": 0.3, "fp8": 0.52}
"""Mean |engine - trainer| in nats: by dtype, of a mixture in bfloat16 whose routers choose for themselves, and of an
engine that computes in FP8. Three times what correct models show, and less than stale weights cost (docs/models.md)."""
PARITY_P99 = 7
"""The limit of the 99th percentile, in limits of the mean."""
_COMPARED = ("group_mean", "leave_one_out", "group_std", "best_of_group", "varied_groups", "zero_variance")
"""Choices that compare the samples of a group."""


class Config(Section):
    """A whole recipe of `areal-lite train`."""

    command: Literal["train"] = "train"
    """what the recipe is for"""
    run: sections.RunConfig = sections.RunConfig()
    launch: sections.LaunchConfig = sections.LaunchConfig()
    model: sections.ModelConfig = sections.ModelConfig()
    data: DataConfig = DataConfig()
    rollout: sections.RolloutConfig = sections.RolloutConfig()
    queue: sections.QueueConfig = sections.QueueConfig()
    verifier: VerifierConfig = VerifierConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    critic: sections.CriticConfig = sections.CriticConfig()
    trainer: sections.TrainerConfig = sections.TrainerConfig()
    weights: sections.WeightsConfig = sections.WeightsConfig()

    _expand_preset = model_validator(mode="before")(expand_preset)

    @property
    def samples_per_step(self) -> int:
        """B, samples of one trainer step."""
        return self.queue.groups_per_step * self.queue.samples_per_group

    @property
    def caches_mb(self) -> int:
        """What the key-value caches of all engines take of a machine's memory; 0 where GPUs hold them."""
        return self.rollout.workers * self.rollout.kv_cache_mb if self.run.device == "cpu" else 0

    @property
    def compute_dtype(self) -> str:
        """The dtype behind `auto`."""
        return self.model.dtype_on(self.run.device)

    def parity_limit(self, *, is_mixture: bool = False) -> float:
        """Nats by which log-probabilities of engines and trainer may differ on average; 0 = any.

        Args:
            is_mixture: The model has experts.
        """
        if (limit := self.weights.parity_limit) != "auto":
            return limit or 0.0
        kinds: list[str] = [self.compute_dtype]
        kinds += ["experts"] * (is_mixture and self.compute_dtype == "bfloat16" and not self.rollout.replay_routes)
        kinds += ["fp8"] * bool(self.rollout.reduced_precision)
        return max(PARITY_LIMITS[kind] for kind in kinds)

    def row_name_problems(self, kind: str, name: Any, *, place: str, at: str = "") -> Iterable[str]:
        """Yield what is wrong with a row's verifier or workflow, if anything. Data must not choose code.

        Args:
            kind: `verifier` or `workflow`.
            place: Begins the message: `data.verifier must be`.
            at: Which row it is.
        """
        own = self.verifier.choosable if kind == "verifier" else {*self.rollout.workflows, *known_names("workflow")}
        option = "verifier.named" if kind == "verifier" else "rollout.workflows"
        known = sorted(own)
        if name not in known and ":" in str(name):
            to_do = f"data must not choose code; give the function a name in {option}, and write that"
            yield f"{place} a known name, got {name!r}{at}: {to_do}"
        elif name not in known:
            near = suggestion(str(name), known)
            yield f"{place} one of {', '.join(known)}, got {name!r}{at}{near}: correct it, or add it to {option}"

    def _problems(self) -> Iterable[str]:
        yield from self._batch_problems()
        for key, source in self.data.sources.items():
            for kind in ("verifier", "workflow"):
                if (name := getattr(source, kind)) is not None:
                    yield from self.row_name_problems(kind, name, place=f"{self.data.place_of(key)}.{kind} must be")
        yield from self._device_problems()
        yield from self._precision_problems()
        yield from self._timeout_problems()
        if (longest := self.rollout.max_new_tokens) >= (context := self.model.max_context):
            got = f"{longest} and {context}: raise model.max_context"
            yield f"rollout.max_new_tokens must leave room for a prompt in model.max_context, got {got}"
        if self.objective.baseline != "critic":
            yield from self.unread(["critic"], "without objective.baseline=critic", at="")
        if self.trainer.packing and self.critic.path is not None:
            yield "trainer.packing was tried with the policy's family alone, got a critic.path too: set one of them"

    def _batch_problems(self) -> Iterable[str]:
        """Of how a step's samples are compared and divided."""
        queue, samples = self.queue, self.samples_per_step
        minibatches, ranks = self.trainer.minibatches, self.trainer.row_ranks
        if samples % minibatches:
            yield (
                "queue.groups_per_step * queue.samples_per_group must be divisible by trainer.minibatches, got "
                f"{queue.groups_per_step} * {queue.samples_per_group} = {samples} and {minibatches}: set "
                "trainer.minibatches to a divisor"
            )
        if samples // minibatches < ranks:
            yield (
                f"every trainer rank needs a sample in each minibatch, got {samples} samples, {minibatches} "
                f"minibatches and {ranks} ranks: raise queue.groups_per_step or lower trainer.ranks"
            )
        choices = {f"objective.{key}": getattr(self.objective, key) for key in ("baseline", "scale", "sample_filter")}
        choices |= {"queue.reject": queue.reject}
        compared = [f"{key}={value}" for key, value in choices.items() if value in _COMPARED]
        if queue.samples_per_group < 2 and compared:
            yield (
                f"queue.samples_per_group must be 2 or more with {' and '.join(compared)}, got 1: samples of a prompt "
                "are compared, and one alone has nothing to learn from"
            )
        if self.objective.proximal == "reuse" and minibatches != 1:
            yield (
                f"objective.proximal=reuse is exact only with one optimiser update, got trainer.minibatches="
                f"{minibatches}: set it to 1, or objective.proximal to recompute"
            )

    def _timeout_problems(self) -> Iterable[str]:
        """Of deadlines, of which one must come first, that which finds who is late."""
        turn_s, stall_s = self.rollout.turn_timeout_s, self.run.stall_timeout_s
        limit_s = self.trainer.collective_timeout_s
        chosen = {self.rollout.workflow, *(source.workflow or "single_turn" for source in self.data.sources.values())}
        is_alone = chosen == {"single_turn"} and self.rollout.workflow_command is None
        if not is_alone and turn_s >= stall_s:
            yield (
                f"rollout.turn_timeout_s must be less than run.stall_timeout_s, got {turn_s:g} and {stall_s:g}: a run "
                "that waits for one reply so long counts as stalled; lower the one or raise the other"
            )
        for name, first_s in {"run.stall_timeout_s": stall_s, "weights.timeout_s": self.weights.timeout_s}.items():
            if self.trainer.ranks > 1 and limit_s <= first_s:
                why = "or ranks give up before it is known who is late; raise it"
                yield f"trainer.collective_timeout_s must be more than {name}={first_s:g}, got {limit_s:g}: {why}"

    def _precision_problems(self) -> Iterable[str]:
        """Of limits that nobody has calibrated."""
        unknown = [one for one in self.rollout.reduced_precision if "fp8" not in one]
        if unknown and self.weights.parity_limit == "auto" and self.weights.parity_every:
            yield (
                f"weights.parity_limit must be a number with rollout.engine_arguments {', '.join(unknown)}, got auto: "
                "set the mean difference of log-probabilities in nats that you accept, or 0 to report only"
            )

    def _device_problems(self) -> Iterable[str]:
        device, transport = self.run.device, self.weights.transport
        workers, parallel, ranks = self.rollout.workers, self.rollout.tensor_parallel, self.trainer.ranks
        if device == "cpu" and transport != "gloo":
            yield f"weights.transport={transport} needs run.device=cuda, got cpu: set weights.transport=gloo"
        if device == "cuda" and transport == "gloo":
            yield "weights.transport=gloo is of the CPU, got run.device=cuda: set weights.transport=nccl (or ipc)"
        if transport == "ipc" and (parallel > 1 or workers > ranks):
            yield (
                "over weights.transport=ipc each engine shares the one GPU of a rank, got rollout.tensor_parallel="
                f"{parallel}, rollout.workers={workers} and trainer.ranks={ranks}: set 1, raise trainer.ranks, or set "
                "weights.transport=nccl"
            )


def load_config(recipe: str, overrides: Iterable[str] = ()) -> Config:
    """Read a recipe, a YAML file or a shipped one's name, and apply overrides as `read_recipe` does.

    Raises:
        ConfigError: The file is missing or unreadable, a key is unknown, a value or combination impossible.
    """
    return parse_config(read_recipe(recipe, overrides, command="train"))


def parse_config(raw: Mapping[str, Any]) -> Config:
    """Turn a nested mapping into a checked `Config`; a `ConfigError` has one line per problem."""
    return parse_section(raw, Config)
