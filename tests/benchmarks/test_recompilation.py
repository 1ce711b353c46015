"""How the benchmark of compilations tells cuDNN of packed documents."""

import numpy as np
import recompilation


def test_padding_is_a_document_right_behind_the_others():
    """A gap in the lengths would have put it past the end of the sequence."""
    found = recompilation.packed_lengths(np.array([1, 1, 1, 2, 3, 3, 0, 0]), 6)
    np.testing.assert_array_equal(found, [3, 1, 2, 2, 0, 0])
    assert found.dtype == np.int32


def test_a_full_sequence_has_no_padding():
    found = recompilation.packed_lengths(np.array([1, 2, 2]), 3)
    np.testing.assert_array_equal(found, [1, 2, 0])
