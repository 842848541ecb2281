"""Pictures of layouts as text."""

from megatron_parallel.mesh.group_names import describe_group
from megatron_parallel.mesh.layout import ParallelLayout


def draw_layout(layout: ParallelLayout, width: int = 100) -> str:
    """Returns a picture of a layout: its ranks as a table, then its groups.

    Each cell is one tensor-parallel group, each row one pipeline rank, each column one coordinate
    on the data-parallel (and context-parallel) axis. Parts that do not fit into `width` characters
    are left out, and the picture shows how many.
    """
    ranks = "1 rank" if layout.world_size == 1 else f"{layout.world_size} ranks"
    parts = [f"{ranks}: {layout}", "", *_table(layout, width), ""]
    parts += _group_lists(layout, width)
    return "\n".join(parts)


def _table(layout: ParallelLayout, width: int) -> list[str]:
    digits = len(str(layout.world_size - 1))
    # Cells are tensor-parallel groups; columns are in the order of the first pipeline rank.
    coordinates = [layout.coordinates(rank) for rank in layout.ranks_of_pipeline_rank(0)]
    columns = sorted({(at.dp, at.cp) for at in coordinates})
    cells = {
        (at.pp, at.dp, at.cp): group
        for group in layout.groups("tp")
        for at in (layout.coordinates(group[0]),)
    }
    titles = [f"dp {dp}" + (f" cp {cp}" if layout.cp > 1 else "") for dp, cp in columns]
    last = layout.pp - 1  # whose texts are the longest
    rank_texts = [_ranks_text(cells[last, dp, cp], digits, width // 2) for dp, cp in columns]
    cell = max(len(text) for text in (*rank_texts, *titles)) + 2
    margin = len(_row_name(layout, last)) + 2
    fitting = max(1, (width - margin - 1 - 12) // (cell + 1))
    shown = columns if len(columns) * (cell + 1) + margin + 1 <= width else columns[:fitting]
    hidden = len(columns) - len(shown)

    def ruled(left: str, middle: str, right: str) -> str:
        return " " * margin + left + middle.join("─" * cell for _ in shown) + right

    more = f" … {hidden} more" if hidden else ""
    lines = [(" " * margin + " " + " ".join(t.center(cell) for t in titles[: len(shown)])).rstrip()]
    lines.append(ruled("┌", "┬", "┐"))
    for index in _elided(layout.pp, 16):
        if index is None:
            lines.append(" " * margin + "  ⋮")
            continue
        texts = (_ranks_text(cells[index, dp, cp], digits, width // 2) for dp, cp in shown)
        row = "│".join(text.center(cell) for text in texts)
        lines.append(_row_name(layout, index).ljust(margin) + f"│{row}│{more}")
    lines.append(ruled("└", "┴", "┘"))
    return lines


def _row_name(layout: ParallelLayout, index: int) -> str:
    if layout.vpp == 1:
        return f"pp {index}"
    stages = [str(stage) for stage in layout.stages(index)]
    if len(stages) > 4:
        stages[2:-1] = ["…"]
    return f"pp {index} (stages {' '.join(stages)})"


def _group_lists(layout: ParallelLayout, width: int) -> list[str]:
    names = [name for name in layout.group_names if name not in ("world", "position_embedding")]
    if not layout.has_expert_parallelism:
        names = [name for name in names if name != "ep" and not name.startswith("expert_")]
    same: dict[tuple[bool, tuple[tuple[int, ...], ...]], list[str]] = {}
    for name in names:
        of_experts = name == "ep" or name.startswith("expert_")
        same.setdefault((of_experts, tuple(layout.groups(name))), []).append(name)
    lines: list[str] = []
    singles: list[str] = []
    for (_, groups), equal in same.items():
        if len(groups[0]) == 1:
            singles += equal
            continue
        head = f"{equal[0]:<16}{len(groups):>6} x {len(groups[0]):<6}"
        lines.append(head + _groups_text(groups, width - len(head)))
        also = f"; also {', '.join(equal[1:])}" if len(equal) > 1 else ""
        lines.append(f"    {describe_group(equal[0])}{also}")
    if singles:
        lines.append("one rank each: " + ", ".join(singles))
    return lines


def _groups_text(groups: tuple[tuple[int, ...], ...], width: int) -> str:
    text = ""
    for i, group in enumerate(groups):
        part = "[" + _ranks_text(group, 0, width // 2) + "] "
        room_for_dots = len(" …") if i + 1 < len(groups) else 0
        if text and len(text) + len(part.rstrip()) + room_for_dots > width:
            return text + "…"
        text += part
    return text.rstrip()


def _ranks_text(ranks: tuple[int, ...], digits: int, width: int) -> str:
    text = " ".join(f"{rank:>{digits}}" if digits else str(rank) for rank in ranks)
    return text if len(text) <= width else f"{ranks[0]} {ranks[1]} … {ranks[-1]}"


def _elided(count: int, limit: int) -> list[int | None]:
    if count <= limit:
        return list(range(count))
    half = limit // 2
    return [*range(half), None, *range(count - half, count)]
