"""A remote MLP next to PyTorch's own and DeepSpeed's TiledMLP on the same cores: prints lines ``name value``, and
tables on stderr.

One SwiGLU layer of transformers' Llama, H 2048, I 5632, forward and backward over loopback, at several lengths;
torch_mlps.py says what the contenders are. A line without a length is of 16384 tokens.

torch_DTYPE_over_REFERENCE, torch_DTYPE_stash_over_REFERENCE: tokens a second over those of ``untiled`` or ``tiled`` in
the same round, the median of the rounds. torch_DTYPE_sent_bytes_per_token, torch_DTYPE_stash_sent_bytes_per_token:
activations to the server. torch_DTYPE_NAME_error: of the worst weight gradient, against f64.
torch_DTYPE_NAME_trainer_mib, torch_DTYPE_NAME_server_mib, torch_DTYPE_held_bytes_per_token[_without_inputs]: see
torch_memory.py. torch_bf16_CASE_TILES_tiles_times_closer: TiledMLP's error over ours, see torch_accuracy.py.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a team that spins would take the server's cores

import torch_accuracy
import torch_memory
import torch_speed
from torch_mlps import DTYPES, LOCAL, REMOTE
from torch_report import Row, plot, spread, table

HEADLINE_TOKENS = 16384
PARTS = ("speed", "memory", "accuracy")


def measure(dtype: str, lengths: list[int], rounds: int, parts: list[str]) -> Iterator[Row]:
    """Rows as they are known, after all of their lines are printed. Memory goes first: what does not fit is not run."""
    rows = {(tokens, name): Row(dtype, tokens, name) for tokens in sorted(lengths) for name in (*LOCAL, *REMOTE)}
    for (tokens, name), row in rows.items() if "memory" in parts else ():
        peaks = torch_memory.measure(name, dtype, tokens)
        row.too_large = peaks is None
        if peaks:
            row.trainer_mib, row.server_mib = peaks.trainer, peaks.server
        show_memory(row)
    if "memory" in parts:
        for keeps, held in torch_memory.measure_held(dtype, min(HEADLINE_TOKENS, max(lengths))).items():
            show(f"torch_{dtype}_held_bytes_per_token{'' if keeps else '_without_inputs'}", f"{held:.0f}")
    if "speed" in parts:
        too_large = {(row.name, row.tokens) for row in rows.values() if row.too_large}
        for tokens, speeds in torch_speed.measure(dtype, lengths, rounds, too_large):
            for name in speeds.rates:
                take_speed(rows[tokens, name], speeds)
            show_speed(dtype, tokens, speeds)
    yield from rows.values()


def take_speed(row: Row, speeds: torch_speed.Speeds) -> None:
    row.rate, row.error = speeds.rate(row.name), speeds.errors[row.name]
    row.over_untiled = speeds.ratios(row.name, "untiled") if row.name != "untiled" else None
    row.over_tiled = speeds.ratios(row.name, "tiled") if row.name in REMOTE else None


def show_memory(row: Row) -> None:
    start = prefix(row.dtype, row.tokens)
    show(f"{start}{row.name}_trainer_mib", "inf" if row.too_large else f"{row.trainer_mib:.0f}")
    if row.server_mib is not None:
        show(f"{start}{row.name}_server_mib", f"{row.server_mib:.0f}")


def show_speed(dtype: str, tokens: int, speeds: torch_speed.Speeds) -> None:
    start = prefix(dtype, tokens)
    for name in speeds.rates:
        kind = "" if name == "remote" else f"{name}_"
        for reference in ("untiled", "tiled"):
            if name != reference and (ratios := speeds.ratios(name, reference)) and (name, reference) != LOCAL:
                show(f"{start}{kind}over_{reference}", f"{statistics.median(ratios):.3f}")
                print(f"{start}{kind}over_{reference}: {spread(ratios)}", file=sys.stderr)
        show(f"{start}{name}_tokens_per_second", f"{speeds.rate(name):.1f}")
        show(f"{start}{name}_error", f"{speeds.errors[name]:.2e}")
    for name, sent in speeds.sent_bytes_per_token.items():
        show(f"{start}{'' if name == 'remote' else 'stash_'}sent_bytes_per_token", f"{sent:.0f}")


def prefix(dtype: str, tokens: int) -> str:
    return f"torch_{dtype}_" if tokens == HEADLINE_TOKENS else f"torch_{dtype}_{tokens}_"


def show(name: str, value: str) -> None:
    print(name, value, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, HEADLINE_TOKENS], help="lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--parts", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--table", type=Path, help="writes the tables there, in Markdown")
    parser.add_argument("--plot", type=Path, help="writes a PNG there")
    arguments = parser.parse_args()
    rows, tables = [], []
    for dtype in arguments.dtype if {"speed", "memory"} & set(arguments.parts) else ():
        rows += measure(dtype, arguments.tokens, arguments.rounds, arguments.parts)
    if rows:
        tables.append(table(rows))
    if "accuracy" in arguments.parts:
        tables.append(torch_accuracy.run())
    print(*tables, sep="\n\n", file=sys.stderr)
    if arguments.table:
        arguments.table.write_text("\n\n".join(tables) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
