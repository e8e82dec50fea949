# SPDX-License-Identifier: Apache-2.0
"""What a pipeline offers beside gradients: forwards alone, variants of it, questions about it, and
its parameters.

Knows configurations and plans; derivatives are in ``pipeline`` and ``gradients``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html import escape
from typing import Any, Generic, Literal, Self, TypeVar, overload

import torch

from .. import tree
from ..actions.product import load_pass, load_product
from ..collectives.group import Group
from ..errors import StageError, checked
from ..programs.wrappers import in_mode
from ..schedule import Placement, Schedule
from ..tree import Tree
from . import calls
from .arguments import Call, Each
from .config import Config
from .copies import Copies
from .plan_cache import Cache
from .plan_report import Plans
from .signatures import A, E, EachLoss, P

Y = TypeVar("Y", covariant=True)
R = TypeVar("R", covariant=True)


class PipelineBase(Generic[Y, R]):
    """The methods of ``Pipeline`` that run no backward."""

    config: Config
    cache: Cache
    group: Group
    copies: Copies | None
    tied: tuple[tuple[str, ...], ...]
    placement: Placement
    stages: int
    here: tuple[int, ...]
    output_rank: int
    call: Callable[..., Call]  # checks the arguments of a call that follows

    def __init__(self, config: Config, cache: Cache | None = None):
        raise NotImplementedError

    @overload
    def __call__(
        self,
        params: Sequence[Tree],
        x: Tree,
        /,
        *targets: Tree,
        state: Sequence[Tree],
        seed: int | None = None,
        **side: Tree,
    ) -> tuple[Any, list[Tree]]: ...

    @overload
    def __call__(
        self: PipelineBase[Y, None],
        params: Sequence[Tree],
        x: Tree,
        /,
        *,
        seed: int | None = None,
        each: None = None,
        **side: Tree,
    ) -> Y: ...

    @overload
    def __call__(
        self: PipelineBase[Y, None],
        params: Sequence[Tree],
        x: Tree,
        /,
        *,
        seed: int | None = None,
        each: Callable[[int, Y], E],
        **side: Tree,
    ) -> list[E] | None: ...

    @overload
    def __call__(
        self: PipelineBase[Y, R],
        params: Sequence[Tree],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        has_aux: bool = False,
        each: EachLoss[Y, R, E],
        **side: Tree,
    ) -> tuple[torch.Tensor, list[E] | None]: ...

    @overload
    def __call__(
        self: PipelineBase[Y, tuple[torch.Tensor, A]],
        params: Sequence[Tree],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        has_aux: Literal[True],
        **side: Tree,
    ) -> tuple[torch.Tensor, list[A]]: ...

    @overload
    def __call__(
        self: PipelineBase[Y, torch.Tensor],
        params: Sequence[Tree],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        **side: Tree,
    ) -> torch.Tensor: ...

    def __call__(
        self,
        params: Sequence[Tree],
        x: Tree,
        /,
        *targets: Tree,
        seed: int | None = None,
        has_aux: bool = False,
        each: Each | None = None,
        **side: Tree,
    ) -> Tree:
        """Forward only: the loss, or without one the outputs. No graph, nothing saved.

        Args:
            params: one pytree for each stage, None for stages of other processes; see ``place``.
            x: the input of the first stage for the whole batch: a pytree of tensors with a batch
                axis first, or ``fpipe.Microbatches``.
            targets: further batch arguments, which the loss takes after the output.
            seed: replaces the seed of the pipeline in this call.
            has_aux: the loss returns ``(scalar, aux)``, and the call ``(loss, [aux, ...])``.
            each: ``each(number, output)`` is called with a microbatch's output as soon as it is
                computed, on the rank of the last stage. Its results are returned in place of the
                outputs, as a list in microbatch order (None on other ranks, unless
                ``outputs="everywhere"``), and the outputs are freed. With a loss it is called as
                that of ``value_and_grad``, and ``(loss, results)`` is returned.
            side: keyword-only arguments that stages or the loss name, split as the batch;
                ``state=[...]`` for stages with state.

        Returns:
            The loss, on every rank; without one the outputs, on the rank of the last stage, and on
            others what ``outputs=`` of the pipeline says. With state, a tuple that ends with the
            new state.

        Raises:
            BatchError: if the batch cannot be split, or an argument does not fit the pipeline.
            StageError: if a parameter does not fit its stage.
            MismatchError: if ranks make different calls.
            PeerError: if another rank failed.

        >>> from fpipe import local, pipeline
        >>> pipe = pipeline([torch.mul] * 2, microbatches=2, group=local(2))
        >>> def each(number, y): return y.sum().item()
        >>> pipe([torch.tensor(2.0), torch.tensor(3.0)], torch.arange(4.0), each=each)
        [6.0, 30.0]
        """
        call = self.call("forward", params, x, targets, side, seed=seed, has_aux=has_aux, each=each)
        if calls.surrounded():
            return load_pass("derived.nested").forward(call)
        return calls.forward(call, self.cache)

    def __repr__(self) -> str:
        return repr(self.config)

    def _repr_html_(self) -> str:
        count = self.config.microbatches
        picture = ""
        if count and self.config.choice is None:
            picture = self.schedule(count)._repr_html_()
        loss = self.config.loss
        return (
            f"<p><b>{escape(repr(self)[1:-1])}</b><br/>microbatches {count or 'of each call'}, "
            f"loss {escape(getattr(loss, '__name__', str(loss)))}</p>{picture}"
        )

    @checked
    def plan(self, params: Sequence[Tree], x: Tree, /, *targets: Tree, **side: Tree) -> Plans:
        """What each rank of this process will run for these arguments, and its peak memory. Nothing
        runs.

        Args:
            params, x, targets, side: as for a call.

        Returns:
            A value that prints one line for each instruction: sends, receives, programs and frees.
            ``.peak`` is the peak memory by rank in bytes, ``.costs`` what the programs are expected
            to take, for ``schedule.simulate``, and ``[rank]`` the plan of one rank.

        Raises:
            BatchError, StageError: as for a call.

        >>> from fpipe import local, pipeline
        >>> plan = pipeline([torch.mul] * 2, microbatches=2,
        ...     group=local(2)).plan([torch.ones(1)] * 2, torch.ones(4))
        >>> sorted(plan.peak)
        [0, 1]
        """
        call = Call.of(
            self.config, "vjp" if self.config.loss is None else "grad", params, x, targets, side
        )
        with self.config.claim():
            return Plans(self.cache.plans_for(call).prepared, self.config.capture)

    @checked
    def explain(
        self, params: Sequence[Tree], x: Tree, /, *targets: Tree, costs: Any = None, **side: Tree
    ) -> Any:
        """One page about a call: what runs where, messages, memory, idle time, and what to change
        first. Nothing runs.

        Every process of the pipeline must call it, and gets the same page.

        Args:
            params, x, targets, side: as for a call. Without targets that the loss needs, the page
                is of the stages alone.
            costs: of ``fpipe.measure_costs``; by default times are estimates from shapes.

        Returns:
            A value that prints the page. ``.save("explain.html")`` writes it, ``.timeline`` is the
            simulated step, ``.advice`` what to change first.

        Raises:
            BatchError, StageError: as for a call.

        >>> from fpipe import local, pipeline
        >>> pipe = pipeline([torch.mul] * 2, microbatches=2, group=local(2))
        >>> page = pipe.explain([torch.ones(1)] * 2, torch.ones(4))
        >>> "What to change first" in str(page)
        True
        """
        return load_product("explanation").explain(self, params, x, targets, side, costs)

    def schedule(self, microbatches: int) -> Schedule:
        """The checked schedule for a number of microbatches.

        Args:
            microbatches: their number in a call.

        Returns:
            The schedule that such a call runs.

        Raises:
            ScheduleError: if the schedule has no form for this number, or breaks a rule.

        >>> from fpipe import local, pipeline
        >>> print(pipeline([torch.mul] * 2, "GPipe", group=local(2)).schedule(2))
        [0F0, 0F1, 0B0, 0B1]
        [1F0, 1F1, 1B0, 1B1]
        """
        return self.config.schedule_for(microbatches)

    @property
    def why(self) -> str:
        """What ``schedule="auto"`` chose and why; print it.

        >>> from fpipe import local, pipeline
        >>> print(pipeline([torch.mul] * 2, "auto", microbatches=2, group=local(2)).why)
        the first call that computes gradients chooses; stages are on ranks as Placement(0: [0], 1:
        [1])
        """
        auto = self.config.choice
        if auto is None:
            return f"{self.config!r}: the schedule was given"
        if not auto.chosen:
            return (
                "the first call that computes gradients chooses; stages are on ranks as "
                f"{self.placement}"
            )
        return "\n\n".join(
            f"{number} microbatches\n{why}" for number, (_, why) in sorted(auto.chosen.items())
        )

    def place(self, params: Sequence[P]) -> list[P]:
        """The parameters of the stages of this process, on their rank's device; ``None`` for the
        others.

        Args:
            params: one pytree for each stage, in stage order; the entries of other processes'
                stages are not read.

        Returns:
            The same list, with None for stages of other processes. Tensors that are there already
            are not copied.

        Raises:
            StageError: if ``params`` does not have one entry for each stage.

        >>> from fpipe import local, pipeline
        >>> pipeline([torch.mul] * 2, group=local(2)).place([torch.ones(1), torch.zeros(1)])
        [tensor([1.]), tensor([0.])]
        """
        self.config.check_params(params)
        out: list[Any] = [None] * self.stages
        for stage in self.here:
            device = self.group.device(self.config.rank_here(stage))

            def move(leaf, device=device):
                return (
                    leaf.to(device) if isinstance(leaf, torch.Tensor) and not leaf.is_meta else leaf
                )

            out[stage] = tree.tree_map(move, params[stage])
        return out

    def shard(self, params: Sequence[P]) -> list[P]:
        """This process's part of whole parameters, placed. With ``zero=`` calls take such parts.

        The trees keep their structure; a leaf becomes one axis with the elements of this copy,
        perhaps none, and any elementwise operation can be applied to it. Without ``zero=`` it is
        ``place``. The pipeline records the shapes of whole leaves here: where parts are read from a
        checkpoint, call it with tensors on the device "meta".

        Args:
            params: whole parameters, one pytree for each stage, as for ``place``.

        Returns:
            A list of the same trees, with None for stages of other processes.

        Raises:
            StageError: if ``params`` does not have one entry for each stage.

        >>> from fpipe import local, pipeline
        >>> pipeline([torch.mul] * 2, group=local(2)).shard([torch.ones(2), torch.zeros(2)])
        [tensor([1., 1.]), tensor([0., 0.])]
        """
        self.config.check_params(params)
        parts: Sequence[Any] = params
        if self.parts is not None:
            frozen = self.config.frozen
            cut = self.cache.shares.cut
            parts = [
                cut(stage, part, frozen) if stage in self.here else None
                for stage, part in enumerate(params)
            ]
        return self.place(parts)

    def unshard(self, parts: Sequence[P]) -> list[P]:
        """The inverse of ``shard``, for a checkpoint: whole trees of the stages of this process.

        Every process must call it.

        Args:
            parts: parameters as ``shard`` returns them, or any trees of that structure, such as the
                moments of an optimizer.

        Returns:
            A list of whole trees, with None for stages of other processes.

        Raises:
            StageError: if ``parts`` does not have one entry for each stage.

        >>> from fpipe import local, pipeline
        >>> pipe = pipeline([torch.mul] * 2, group=local(2))
        >>> pipe.unshard(pipe.shard([torch.ones(2), torch.zeros(2)]))
        [tensor([1., 1.]), tensor([0., 0.])]
        """
        self.config.check_params(parts)
        if self.parts is None:
            return list(parts)
        join = self.cache.shares.join
        whole: list[Any] = [None if part is None else join(s, part) for s, part in enumerate(parts)]
        return whole

    def gather(self, obj: object) -> list[Any]:
        """What every process of the pipeline passed, by rank. Every process must call it.

        Args:
            obj: numbers, text, plain tensors on the CPU, and containers of them.

        Returns:
            A list with one entry for each rank, the same on all.

        >>> from fpipe import local, pipeline
        >>> pipeline([torch.mul] * 2, group=local(2)).gather({"process": 0})
        [{'process': 0}, {'process': 0}]
        """
        return self.group.gather_objects(obj)

    def all_sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the pipeline's processes; where they hold parts of stages, over
        its copies too.

        Every process must call it. Quantities of the whole model, such as a norm, are sums over
        stages.

        Args:
            tensor: this process's part of the sum, of one shape on all processes.

        Returns:
            The sum, on every process.

        Raises:
            StageError: for what is no tensor.

        >>> from fpipe import local, pipeline
        >>> pipeline([torch.mul] * 2, group=local(2)).all_sum(torch.ones(1))
        tensor([1.])
        """
        if not isinstance(tensor, torch.Tensor):
            raise StageError(f"all_sum got {tensor!r:.100}; give a tensor, as torch.tensor(1.0)")
        total = self.group.all_reduce(tensor)
        if self.parts is None:
            return total
        return self.parts.all_reduce(total)

    def train(self, training: bool = True) -> Self:
        """The same pipeline with its modules in training, whatever mode they were cut in; this one
        is unchanged.

        Stages that are functions have no modes. A norm whose running statistics are constants,
        since it was cut in evaluation, cannot be trained.

        Args:
            training: whether modules are in training; False is ``eval()``.

        Returns:
            A pipeline that takes the same placed parameters.

        Raises:
            StageError: if ``training`` is neither True nor False.

        >>> from fpipe import from_module, local, pipeline
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))
        >>> stages, params = from_module(model, cuts=["1"])
        >>> pipe = pipeline(stages, microbatches=1, group=local(2), seed=0)
        >>> y, mean = pipe.train()(params, torch.ones(1, 2)), pipe.eval()(params, torch.ones(1, 2))
        >>> bool(torch.isin(y, torch.stack([0 * mean, 2 * mean])).all())
        True
        """
        if not isinstance(training, bool):
            raise StageError(f"training={training!r:.100}; give True or False")
        modes = self.cache.modes
        if training not in modes:
            cache = Cache(self.cache.shares, self.cache.copies_compared)
            cache.modes = modes
            functions = tuple(in_mode(stage, training) for stage in self.config.functions)
            modes[training] = replace(self.config, functions=functions), cache
        return type(self)(*modes[training])

    def eval(self) -> Self:
        """The same pipeline with its modules in evaluation, as ``module.eval()``; see
        :meth:`train`.

        Returns:
            A pipeline that takes the same placed parameters.

        >>> from fpipe import local, pipeline
        >>> pipe = pipeline([torch.mul] * 2, microbatches=1, group=local(2))
        >>> pipe.eval()([torch.tensor(2.0)] * 2, torch.ones(1))
        tensor([4.])
        """
        return self.train(False)

    def captured(self) -> Self:
        """The same pipeline whose steps are recorded as graphs of kernels; this one is unchanged.

        Steps of ``value_and_grad`` and ``grad`` are recorded once for each signature and started
        in later steps, with the same bits: for stages so small that starting kernels takes longer
        than they run. All ranks are in this process on one GPU. The memory of a graph stays
        allocated; arguments that move in memory are copied in each step. A step that cannot be
        recorded runs without, with a warning.

        Returns:
            A pipeline that takes the same placed parameters.

        Raises:
            StageError: if the ranks are not on one accelerator, or there are copies of the
                pipeline.

        >>> from fpipe import local, pipeline
        >>> pipeline([torch.mul] * 2, group=local(2)).captured()
        Traceback (most recent call last):
        ...
        fpipe.errors.StageError: captured() records graphs of kernels on one accelerator...
        """
        load_pass("capture.steps").check(self.group, self.copies is not None)
        return type(self)(replace(self.config, capture=True))

    def under(self, schedule: Schedule) -> Self:
        """The same pipeline with another schedule that places the stages on the same ranks; this
        one is unchanged.

        Args:
            schedule: as from ``fpipe.make_schedule``, for the ranks and stages of this pipeline.

        Returns:
            A pipeline that takes the same placed parameters.

        Raises:
            StageError: if the schedule places stages on other ranks.

        >>> from fpipe import local, make_schedule, pipeline
        >>> pipe = pipeline([torch.mul] * 2, "GPipe", group=local(2))
        >>> pipe.under(make_schedule("1F1B", 2, 4))
        <fpipe pipeline: 2 stages, schedule 1F1B, fpipe.local(2) on cpu>
        """
        if repr(schedule.placement) != repr(self.placement):
            raise StageError(
                f"the schedule has stages on other ranks ({schedule.placement}) than the pipeline "
                f"({self.placement}); "
                "make a pipeline with it, and place the parameters anew"
            )
        config = replace(self.config, schedule=schedule, microbatches=schedule.microbatches)
        return type(self)(config, Cache(self.cache.shares, self.cache.copies_compared))

    @checked
    def rerouted(self, without: Sequence[int]) -> Self:
        """The same pipeline without some ranks, where their stages have copies on other ranks; this
        one is unchanged.

        The other copies of a stage get the microbatches of the lost ones. The ranks that remain
        keep their stages and parameters, and are numbered from 0 again. All of them call this, and
        the lost ranks do not: where a process ended, the others go on in a process group of their
        own, and a step that failed runs again with the parameters in memory.

        Args:
            without: the ranks that are lost.

        Returns:
            A pipeline on the other ranks that takes the same placed parameters. Its gradients are
            added in the order of microbatches where those of this one are.

        Raises:
            StageError: if a stage has no copy on another rank, or the pipeline has ``dp=``.
            UnsupportedError: if the group cannot make a group of some of its ranks.

        >>> from fpipe import local, make_schedule, pipeline
        >>> schedule = make_schedule("1F1B", 4, 12, replicas=(3, 1))
        >>> pipe = pipeline([torch.mul] * 2, schedule, group=local(4))
        >>> pipe.rerouted(without=[2]).placement
        Placement(0: [0], 1: [0], 2: [1])
        """
        return load_pass("rerouting").rerouted(self, without)

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks that this one refuses the arguments of the next call.

        They raise at once instead of waiting. The caller raises the error itself.

        Args:
            error: what is wrong with the arguments.

        >>> from fpipe import local, pipeline
        >>> pipeline([torch.mul] * 2, group=local(2)).refuse(ValueError("no target"))
        """
        calls.refuse(self.config, error)

    @property
    def parts(self) -> Group | None:
        """The group whose processes hold parts of the same leaves; None where leaves are whole."""
        if self.copies is not None and self.copies.cut:
            return self.copies.group
        return None

    def rehearse(
        self,
        ranks: Sequence[int],
        params: Sequence[Tree],
        x: Tree,
        *targets: Tree,
        copies: int = 1,
        zero: int = 0,
        note: Callable[[str], None] = lambda text: None,
    ) -> tuple[dict[int, Any], Any]:
        """The plans that ranks of this local group would have if each were a process, beside
        ``copies`` of the pipeline. Nothing runs.

        Args:
            ranks: those whose plans are wanted.
            params, x, targets: as for a call; tensors on the device meta will do. ``x`` and
                ``targets`` are those of one copy.
            copies: how many copies of the pipeline there are.
            zero: what they share, as in ``fpipe.pipeline``.
            note: called with what is done next.

        Returns:
            By rank its ``plan``, the bytes of its ``parameters``, and of ``sent`` and ``received``
            messages number and bytes; and the seconds of tracing and lowering.

        Raises:
            BatchError, StageError: as for a call.

        >>> from fpipe import local, pipeline
        >>> pipe = pipeline([torch.mul] * 2, loss=torch.sum, microbatches=2, group=local(2))
        >>> by_rank, spent = pipe.rehearse([1], [torch.ones(1)] * 2, torch.ones(4))
        >>> by_rank[1].received, by_rank[1].parameters
        ((2, 16), 4)
        """
        return load_pass("rehearsal").rehearse(
            self, ranks, params, x, *targets, copies=copies, zero=zero, note=note
        )
