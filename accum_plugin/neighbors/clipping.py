"""ACC204 and ACC206: what is clipped, and whether it is the whole window's unscaled gradient."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from accum_plugin.finding import Finding
from accum_plugin.neighbors.base import Clip, Neighbor
from accum_plugin.neighbors.scaling import Scaling
from accum_plugin.rules.boundary import AmpOrder, ClipPerMicrobatch

if TYPE_CHECKING:
    from accum_plugin.session import Session
    from accum_plugin.window import Backward, OptimizerWindow

SHOWN = 8  # norms quoted in a message


@dataclasses.dataclass
class _Clips:
    first: Backward  # the window's first contribution: a window that starts again is another one
    seen: list[Clip] = dataclasses.field(default_factory=list)
    held: list[int] = dataclasses.field(default_factory=list)  # microbatches in the window at each clip
    midway: int = 0  # clips that another contribution followed
    whole: float | None = None  # the norm that the window would have without clipping


class Clipping(Neighbor):
    """Follows the order of clips and contributions. A clip with a contribution after it was inside the window.

    Args:
        session: The session whose windows it watches.
        scaling: Knows the loss scale that gradients carry.
    """

    def __init__(self, session: Session, scaling: Scaling) -> None:
        super().__init__(session)
        self._scaling = scaling
        self._clips: dict[int, _Clips] = {}

    def clipping(self, window: OptimizerWindow, clip: Clip) -> None:
        """Remember the clip, and check at once whether the gradients still carry the loss scale."""
        if not window.backwards:
            return
        self._check_scale(window, clip)
        clips = self._of(window) or self._clips.setdefault(window.index, _Clips(window.backwards[0]))
        if clips.midway:
            clips.whole = self._unclipped(window, clip)
        clips.seen.append(clip)
        clips.held.append(window.microbatches)

    def entered(self, window: OptimizerWindow) -> None:
        """A contribution after a clip: the clip was not at the window's end."""
        clips = self._of(window) if self._clips else None
        if clips is not None:
            clips.midway = len(clips.seen)

    def stepping(self, window: OptimizerWindow) -> None:
        """The window ends: say what was clipped inside it."""
        clips = self._of(window) if self._clips else None
        if clips is not None and clips.midway:
            self.report(clipped_midway(clips, window.microbatches, window.steps_taken))

    def stepped(self, window: OptimizerWindow) -> None:
        """Forget the window."""
        self._clips.pop(window.index, None)

    def _of(self, window: OptimizerWindow) -> _Clips | None:
        clips = self._clips.get(window.index)
        if clips is None or not window.backwards or clips.first is not window.backwards[0]:
            self._clips.pop(window.index, None)
            return None
        return clips

    def _unclipped(self, window: OptimizerWindow, clip: Clip) -> float | None:
        """The window's norm had nothing been clipped, from the followed elements; ``None`` where they cannot tell.

        What stands in ``.grad`` over what was contributed is the product of all clips so far. It is one number only
        where every contribution was shortened alike, so this is an estimate.
        """
        if clip.norm is None or self.session.reduction.distributed or self.host.loss_scale() is not None:
            return None
        contributed, grads, _, _ = window.sentinel.sample()
        length = math.sqrt(sum(g * g for g in grads))
        return float(clip.norm.tolist()) * math.sqrt(sum(c * c for c in contributed)) / length if length else None

    def _check_scale(self, window: OptimizerWindow, clip: Clip) -> None:
        scale = self._scaling.left_in(window.optimizer)
        if scale is not None:
            self.report(clipped_scaled(clip.threshold, float(scale.tolist()), window.steps_taken))


def clipped_midway(clips: _Clips, microbatches: int, optimizer_step: int) -> Finding:
    """Word what was clipped inside a window.

    Args:
        clips: The window's clips, in order.
        microbatches: Microbatches in the window.
        optimizer_step: Index of the step the window ends with.
    """
    held = ", ".join(str(count) for count in clips.held[:SHOWN])
    at = f"{clips.seen[0].threshold:g}"
    seen = f"gradients were clipped at {at} inside the window, after {held} of {microbatches} microbatches"
    norms = [float(clip.norm.tolist()) for clip in clips.seen if clip.norm is not None]
    if norms:
        seen += f": the norms were {', '.join(f'{norm:.4g}' for norm in norms[:SHOWN])}"
        if clips.whole is not None:
            seen += f", where the whole window's is about {clips.whole:.4g}"
    return ClipPerMicrobatch.finding(f"{seen}.", optimizer_step=optimizer_step)


def clipped_scaled(threshold: float, scale: float, optimizer_step: int) -> Finding:
    """Word a clip of gradients that still carry the fp16 loss scale."""
    seen = (
        f"gradients were clipped at {threshold:g} while they still carry the loss scale {scale:g}: "
        f"the threshold is {threshold / scale:.3g} in truth, off by a factor of {scale:g}."
    )
    return AmpOrder.finding(seen, optimizer_step=optimizer_step, cause="clip")
