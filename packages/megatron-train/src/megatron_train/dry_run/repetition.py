"""How many micro-batches a rank has to run until its schedule repeats."""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from megatron_parallel import LayoutError
from megatron_parallel.pipeline import check_micro_batches, simulate

from megatron_train.config.run import RunConfig


class Repetition(NamedTuple):
    """Numbers of micro-batches of a step from which the whole step follows.

    Attributes:
        whole: Micro-batches of the whole step.
        memory: Micro-batches with as many in flight on this rank as in the whole step, and a period
            more, in which they are replaced.
        short: The fewest that the schedule supports, up to a multiple of ``period``.
        period: Micro-batches by which the schedule repeats.
    """

    whole: int
    memory: int
    short: int
    period: int

    @property
    def times(self) -> int:
        """How many periods the whole step has in addition to ``short`` micro-batches."""
        return (self.whole - self.short) // self.period

    @property
    def sizes(self) -> tuple[int, ...]:
        """Micro-batches of each step of a dry run.

        The first step with a new number of micro-batches prepares the pipeline, so there are two.
        """
        longer = (self.short + self.period,) * 2 if self.times else ()
        return (self.memory, self.short, self.short, *longer)


def find_repetition(run: RunConfig, pipeline_rank: int) -> Repetition:
    """Returns from which numbers of micro-batches the step of a rank follows.

    Every micro-batch passes each stage once forward and once backward, so each further period adds
    the same numbers of kernels, waits and bytes. The memory is that of the micro-batches in flight.

    Args:
        run: The run, with a resolved layout.
        pipeline_rank: Coordinate on the axis ``pp``.
    """
    layout = run.layout
    pp, vpp = layout.pp, layout.vpp
    whole = run.batch_sizes.last // run.micro_batch_times_data_parallel_size
    if pp == 1:  # one micro-batch after the other
        return Repetition(whole, min(whole, 2), 1, 1)
    schedule, group = run.pipeline.resolve_schedule(layout), run.pipeline.group_size
    period = (group or pp) if vpp > 1 else 1

    def supported() -> Iterator[int]:
        for count in range(whole % period or period, whole, period):
            try:
                check_micro_batches(schedule, pp, vpp, count, group)
            except LayoutError:
                continue
            yield count
        yield whole

    def in_flight(micro_batches: int) -> Fraction:
        timeline = simulate(schedule, pp, micro_batches, vpp, group_size=group)
        return timeline.peak_in_flight[pipeline_rank]

    most = in_flight(whole)
    memory = next(count for count in supported() if in_flight(count) == most)
    return Repetition(whole, min(memory + period, whole), next(supported()), period)
