"""Rounding from f64."""

import torch


def rounded(values, dtype):
    """`values`, f64, rounded once to the nearest of `dtype`. torch rounds to f16 and bf16 twice, by way of f32."""
    nearest = values.to(dtype)
    if dtype not in (torch.float16, torch.bfloat16):
        return nearest
    for step in (-1, 1):
        neighbour = (nearest.view(torch.int16) + step).view(dtype)
        nearer = (neighbour.double() - values).abs() < (nearest.double() - values).abs()
        nearest = torch.where(nearer, neighbour, nearest)
    return nearest
