"""A mask of your own, planned over eight ranks and drawn: python examples/custom_mask.py

A video model reads a prompt and then frames. Frames see the prompt and the last two frames entirely; the
prompt is causal; and a few summary tokens at the end see everything.
"""

from pathlib import Path

import numpy as np

import magi_jax as mj

PROMPT, FRAME, NUM_FRAMES, SUMMARY = 500, 320, 24, 16
T = PROMPT + FRAME * NUM_FRAMES + SUMMARY

# Slices are query ranges, key ranges and a type or a band; here one slice per frame and one more.
start = PROMPT + FRAME * np.arange(NUM_FRAMES)
frames = np.stack([start, start + FRAME], axis=1)
seen = np.stack([np.maximum(start - FRAME, PROMPT), start + FRAME], axis=1)
to_frames = mj.AttnMask.from_slices(frames, seen, mj.MaskType.FULL, q_len=T)
to_prompt = mj.AttnMask.from_slices(
    q_ranges=[(0, PROMPT), (PROMPT, T)],
    k_ranges=[(0, PROMPT), (0, PROMPT)],
    types=[mj.MaskType.CAUSAL, mj.MaskType.FULL],
    q_len=T,
)
# `|` cuts what is already covered, so that every cell is computed once.
mask = to_frames | to_prompt | mj.masks.global_rows(T, rows=(T - SUMMARY, T))
print(f"{len(mask.slices)} slices, {mask.area / T**2:.1%} of all pairs are visible")

plan = mj.make_plan(mask, cp_size=8)
print(plan.report())
path = Path("outputs") / "custom_mask.png"
path.parent.mkdir(exist_ok=True)
plan.plot(path)
print(f"picture: {path}")
