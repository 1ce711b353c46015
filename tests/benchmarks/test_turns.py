"""What is compared takes turns, and a ratio leaves out turns in which a card stalled."""

import jax.numpy as jnp
import pytest
import turns


def test_turns_alternate_and_the_first_has_one_more(monkeypatch):
    for name, value in {"SETTLE_S": 0.0, "PASS_S": 0.0, "LEAST_ROUNDS": 2}.items():
        monkeypatch.setattr(f"turns.{name}", value)
    made = []

    def call(name):
        made.append(name)
        return jnp.zeros(())

    # As if they took so long: one call of "a" is as long as two of "b".
    once = {"a": 0.2, "b": 0.1}
    seconds = turns._timed({name: lambda name=name: call(name) for name in once}, once)
    assert "".join(made) == "a" + "abb" + "abb" + "a"
    assert {name: len(each) for name, each in seconds.items()} == {"a": 3, "b": 2}
    assert all(x > 0 for each in seconds.values() for x in each)


def test_the_end_of_each_call_is_that_of_its_result():
    ends = turns._ends([lambda: jnp.zeros(())] * 7, ahead=3)
    assert len(ends) == 7
    assert ends == sorted(ends)


def test_a_ratio_leaves_out_turns_in_which_a_card_stalled():
    other = [1.0] * 20
    other[7] = 5.0
    value, error = turns.ratio([2.0] * 21, other)
    assert (value, error) == (2.0, 0.0)
    value, error = turns.ratio([2.0, 2.2, 1.8, 2.0], [1.0, 1.0, 1.0])
    assert value == pytest.approx(2.0)
    assert error == pytest.approx(0.1 / 3**0.5)
