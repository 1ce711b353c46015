"""Published rates of MagiAttention and of the strategies beside it, over 8 to 64 H100s."""

# TFLOP/s per GPU at 8, 16, 32 and 64 H100s, read off the bar charts of MagiAttention v1.1's benchmark pages
# (about 5 either way); its masks are packings of its own document lengths.
PUBLISHED_RANKS = (8, 16, 32, 64)
PUBLISHED = {
    ("full", "forward"): {
        "magi native": (663, 652, 643, 627), "magi a2av": (647, 642, 622, 616),
        "ulysses": (603, 573, 581, 618), "usp": (579, 603, 593, 605),
        "ring all-gather": (606, 594, 587, 583), "ring p2p": (511, 535, 517, 513),
    },
    ("full", "backward"): {
        "magi native": (534, 545, 546, 548), "magi a2av": (513, 514, 513, 514),
        "ulysses": (575, 572, 581, 576), "usp": (570, 588, 587, 580),
        "ring all-gather": (533, 543, 540, 536), "ring p2p": (496, 519, 513, 505),
    },
    ("causal", "forward"): {
        "magi native": (643, 646, 619, 593), "magi a2av": (608, 583, 576, 570),
        "ulysses": (599, 556, 579, 581), "usp": (593, 590, 594, 586),
        "ring all-gather": (601, 592, 591, 580), "ring p2p": (421, 455, 452, 446),
    },
    ("causal", "backward"): {
        "magi native": (528, 529, 538, 527), "magi a2av": (501, 508, 499, 495),
        "ulysses": (581, 559, 571, 583), "usp": (572, 570, 575, 571),
        "ring all-gather": (516, 525, 523, 523), "ring p2p": (432, 475, 469, 457),
    },
    ("varlen_full", "forward"): {
        "magi native": (534, 536, 451, 400), "magi a2av": (460, 415, 372, 298),
        "ulysses": (389, 303, 281, 258), "usp": (373, 370, 373, 291),
        "ring all-gather": (386, 386, 323, 248), "ring p2p": (159, 134, 91, 56),
    },
    ("varlen_full", "backward"): {
        "magi native": (446, 461, 454, 423), "magi a2av": (408, 423, 404, 352),
        "ulysses": (424, 397, 376, 345), "usp": (420, 407, 374, 279),
        "ring all-gather": (230, 191, 123, 63), "ring p2p": (160, 161, 101, 48),
    },
    ("varlen_causal", "forward"): {
        "magi native": (457, 426, 314, 237), "magi a2av": (387, 304, 273, 206),
        "ulysses": (278, 197, 184, 162), "usp": (261, 251, 255, 192),
        "ring all-gather": (288, 292, 240, 180), "ring p2p": (89, 69, 48, 28),
    },
    ("varlen_causal", "backward"): {
        "magi native": (360, 370, 333, 264), "magi a2av": (335, 352, 325, 242),
        "ulysses": (331, 293, 275, 248), "usp": (325, 309, 284, 195),
        "ring all-gather": (179, 155, 104, 55), "ring p2p": (97, 86, 57, 29),
    },
}  # fmt: skip
