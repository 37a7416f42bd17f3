"""Which engines receive weights together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf.weights.groups import Membership, TransferGroup


def members(membership):
    return [(group.epoch, group.engines) for group in membership.groups]


def test_engines_are_put_into_groups_of_at_most_the_given_size():
    membership = Membership(group_size=3)
    membership.admit(range(7))
    assert members(membership) == [(0, (0, 1, 2)), (1, (3, 4, 5)), (2, (6,))]


def test_admitting_an_engine_leaves_the_other_groups_as_they_are():
    membership = Membership(group_size=3)
    membership.admit([0, 1])
    assert membership.admit([2]) == [TransferGroup(1, (2,))]
    assert members(membership) == [(0, (0, 1)), (1, (2,))]


def test_removing_an_engine_regroups_its_companions_under_a_new_epoch_and_nobody_else():
    membership = Membership(group_size=2)
    membership.admit(range(6))
    dissolved = membership.remove([1, 4])
    assert [group.epoch for group in dissolved] == [0, 2]
    # 0 and 5 are what is left of groups 0 and 2.
    assert members(membership) == [(1, (2, 3)), (3, (0, 5))]


def test_a_renewed_group_keeps_its_engines_and_gets_a_new_epoch():
    membership = Membership(group_size=2)
    membership.admit(range(4))
    first, _ = membership.groups
    membership.renew([first])
    assert members(membership) == [(1, (2, 3)), (2, (0, 1))]
    # The old one is gone by now.
    membership.renew([first])
    assert members(membership) == [(1, (2, 3)), (2, (0, 1))]


def test_an_engine_is_admitted_once():
    membership = Membership(group_size=2)
    membership.admit([0, 1])
    with pytest.raises(ValueError, match=r"engines \[1\] are members already"):
        membership.admit([1, 2])


def test_a_sync_takes_whole_groups():
    membership = Membership(group_size=2)
    membership.admit(range(4))
    assert [group.epoch for group in membership.of([2, 3])] == [1]
    assert [group.epoch for group in membership.of(None)] == [0, 1]
    with pytest.raises(ValueError, match=r"engines \[2, 3\] receive together"):
        membership.of([2])
    with pytest.raises(ValueError, match=r"engines \[9\] are not members"):
        membership.of([9])


@given(st.integers(1, 4), st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 12), max_size=5)), max_size=12))
def test_whoever_comes_and_goes_groups_stay_within_bounds_and_epochs_are_never_reused(size, events):
    membership = Membership(size)
    present: set[int] = set()
    seen: dict[int, tuple[int, ...]] = {}
    for comes, engines in events:
        if comes:
            membership.admit(engines - present)
            present |= engines
        else:
            membership.remove(engines)
            present -= engines
        held = [engine for group in membership.groups for engine in group.engines]
        assert sorted(held) == sorted(present)
        for group in membership.groups:
            assert 1 <= len(group.engines) <= size
            assert seen.setdefault(group.epoch, group.engines) == group.engines
