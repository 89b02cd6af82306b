"""The pager: what comes in and what goes out, by hand and against a pager written another way."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sim.builders.paging import Action, Event, Move, PagedStep, Pager, Tensor
from sim.errors import DoesNotFit
from sim.plan import Residency, Writeback
from sim.schedule import TaskKind, TensorKind

PLENTY = 10**9
SEEDS, LENGTHS = st.integers(0, 2**32), st.integers(1, 30)


def tensor(size: int, layer: int = 0) -> Tensor:
    return Tensor(kind=TensorKind.WEIGHT, layer=layer, bytes=size)


def step(*touches: Tensor, **fields: object) -> PagedStep:
    return PagedStep(kind=TaskKind.FORWARD, layer=0, touches=touches, **fields)  # type: ignore[arg-type]


def play(pager: Pager, steps: list[PagedStep]) -> list[tuple[list[Move], list[Move]]]:
    """What the pager does before and after each step; after the last one, everything goes."""
    played = []
    for now, following in with_following(steps, pager.looks_ahead):
        before = pager.make_ready(now, following) + pager.prefetch(now, following, happened=())
        after = pager.settle(now, following)
        played.append((before, after if following else after + pager.flush()))
    return played


def with_following(steps: list[PagedStep], count: int) -> list[tuple[PagedStep, list[PagedStep]]]:
    """Each step with the ``count`` after it."""
    return [(now, steps[at + 1 : at + 1 + count]) for at, now in enumerate(steps)]


def come_in(each: Tensor) -> Move:
    return Move(Action.COME_IN, each)


def go_out(each: Tensor) -> Move:
    return Move(Action.GO_OUT, each)


def drop(each: Tensor) -> Move:
    return Move(Action.DROP, each)


class TestTwoLayers:
    """Forward, then backward of a layer: a changes nothing, x dies in the second step, y is handed on to it."""

    a, b, x, y = tensor(5, 0), tensor(7, 1), tensor(2, 0), tensor(3, 1)

    def steps(self) -> list[PagedStep]:
        return [
            step(self.a, self.x, self.y, creates=(self.y,), hands_on=(self.y,)),
            step(self.b, self.x, self.y, changes=(self.b,), dies=(self.y,)),
            step(self.a, self.x, dies=(self.x,)),
        ]

    def test_none_keeps_only_what_is_handed_on(self):
        a, b, x = self.a, self.b, self.x
        assert play(Pager(0, PLENTY, Residency.NONE, Writeback.ALWAYS), self.steps()) == [
            ([come_in(a), come_in(x)], [go_out(a), go_out(x)]),
            ([come_in(b), come_in(x)], [drop(self.y), go_out(b), go_out(x)]),
            ([come_in(a), come_in(x)], [drop(x), go_out(a)]),
        ]

    def test_next_keeps_what_the_next_step_touches(self):
        a, b, x = self.a, self.b, self.x
        assert play(Pager(0, PLENTY, Residency.NEXT, Writeback.ALWAYS), self.steps()) == [
            ([come_in(a), come_in(x)], [go_out(a)]),
            ([come_in(b)], [drop(self.y), go_out(b)]),
            ([come_in(a)], [drop(x), go_out(a)]),
        ]

    def test_lru_keeps_everything_while_it_fits(self):
        a, b, x = self.a, self.b, self.x
        assert play(Pager(0, PLENTY, Residency.LRU, Writeback.ALWAYS), self.steps()) == [
            ([come_in(a), come_in(x)], []),
            ([come_in(b)], [drop(self.y)]),
            ([], [drop(x), go_out(b), go_out(a)]),
        ]

    def test_drop_writes_only_what_changed(self):
        a, b, x = self.a, self.b, self.x
        assert play(Pager(0, PLENTY, Residency.NONE, Writeback.DROP), self.steps()) == [
            ([come_in(a), come_in(x)], [drop(a), drop(x)]),
            ([come_in(b), come_in(x)], [drop(self.y), go_out(b), drop(x)]),
            ([come_in(a), come_in(x)], [drop(x), drop(a)]),
        ]


def test_lru_evicts_the_least_recently_used_first_and_ties_by_touch_order():
    a, b, c, d = (tensor(size) for size in (4, 3, 2, 9))
    pager = Pager(0, 14, Residency.LRU, Writeback.DROP)
    played = play(pager, [step(a, b, c), step(a), step(d)])
    # 9 bytes come in beside 9: b and c were used before a, b was touched before c.
    assert played[2][0] == [drop(b), drop(c), come_in(d)]


def test_lru_makes_room_tensor_by_tensor_and_for_the_workspace_last():
    old, older, new, other = tensor(4), tensor(4), tensor(4), tensor(4)
    pager = Pager(0, 12, Residency.LRU, Writeback.ALWAYS)
    played = play(pager, [step(older), step(old), step(new, other, workspace_bytes=4)])
    assert played[2][0] == [come_in(new), go_out(older), come_in(other), go_out(old)]


def test_a_pinned_tensor_is_not_evicted_though_it_is_the_oldest():
    a, b, c = tensor(4), tensor(4), tensor(4)
    pager = Pager(0, 8, Residency.LRU, Writeback.DROP)
    assert play(pager, [step(a), step(b), step(c, a)])[2][0] == [drop(b), come_in(c)]


def test_a_copy_that_went_out_is_clean_when_it_comes_back():
    a, b = tensor(4), tensor(4)
    pager = Pager(0, 4, Residency.LRU, Writeback.DROP)
    played = play(pager, [step(a, changes=(a,)), step(b), step(a), step(b)])
    assert [before for before, _ in played] == [
        [come_in(a)],
        [go_out(a), come_in(b)],
        [drop(b), come_in(a)],
        [drop(a), come_in(b)],
    ]


def test_stale_copies_are_freed_unwritten_and_what_must_go_out_does():
    a, b, c = tensor(4), tensor(4), tensor(4)
    pager = Pager(0, PLENTY, Residency.LRU, Writeback.ALWAYS)
    played = play(pager, [step(a, b), step(c, changes=(c,), stale=(a,), goes_out=(c,)), step(a, c)])
    assert played[1] == ([come_in(c)], [drop(a), go_out(c)])
    assert played[2][0] == [come_in(a), come_in(c)]


def test_a_step_that_does_not_fit_alone_is_refused_with_its_layer_and_bytes():
    a, b = tensor(4), tensor(4)
    needed = step(a, b, workspace_bytes=3)
    pager = Pager(2, 10, Residency.LRU, Writeback.DROP)
    with pytest.raises(DoesNotFit) as refusal:
        pager.make_ready(needed)
    error = refusal.value
    assert (error.gpu, error.layers, error.needed, error.cap) == (2, (0, 0), 11, 10)
    assert Pager(2, 11, Residency.LRU, Writeback.DROP).make_ready(needed) == [come_in(a), come_in(b)]


class TestPrefetch:
    a, b, c, d = tensor(4, 0), tensor(4, 1), tensor(4, 2), tensor(4, 3)

    def before(self, cap: int, residency: Residency, depth: int, *steps: PagedStep) -> list[list[Move]]:
        return [before for before, _ in play(Pager(0, cap, residency, Writeback.DROP, depth), list(steps))]

    def test_of_as_many_steps_ahead_as_are_asked_for(self):
        a, b, c, d = map(come_in, (self.a, self.b, self.c, self.d))
        steps = [step(self.a), step(self.b), step(self.c), step(self.d)]
        assert self.before(PLENTY, Residency.NONE, 0, *steps) == [[a], [b], [c], [d]]
        assert self.before(PLENTY, Residency.NONE, 1, *steps) == [[a, b], [c], [d], []]
        assert self.before(PLENTY, Residency.NONE, 2, *steps) == [[a, b, c], [d], [], []]

    def test_what_came_in_early_stays_until_it_is_used(self):
        steps = [step(self.a), step(self.b), step(self.c), step(self.a)]
        _, after = zip(*play(Pager(0, PLENTY, Residency.NEXT, Writeback.DROP, 2), steps), strict=True)
        assert after == ([drop(self.a)], [drop(self.b)], [drop(self.c)], [drop(self.a)])

    def test_what_is_made_on_the_way_does_not_come_in(self):
        made = tensor(4)
        steps = [step(self.a), step(made, creates=(made,)), step(made, self.b, dies=(made,))]
        assert self.before(PLENTY, Residency.NONE, 2, *steps) == [[come_in(self.a), come_in(self.b)], [], []]

    def test_only_as_far_as_fits_beside_the_steps_before(self):
        """Beside a and b are 4 bytes free, but not while b's step works."""
        steps = [step(self.a), step(self.b, workspace_bytes=5), step(self.c)]
        assert self.before(12, Residency.LRU, 2, *steps)[0] == [come_in(self.a), come_in(self.b)]
        assert self.before(17, Residency.LRU, 2, *steps)[0] == [come_in(self.a), come_in(self.b), come_in(self.c)]

    def test_evicts_only_what_none_of_the_steps_touches(self):
        steps = [step(self.a), step(self.b), step(self.c), step(self.a)]
        assert self.before(12, Residency.LRU, 1, *steps) == [
            [come_in(self.a), come_in(self.b)],
            [come_in(self.c)],
            [],
            [],
        ]
        assert self.before(8, Residency.LRU, 1, *steps) == [
            [come_in(self.a), come_in(self.b)],
            [drop(self.a), come_in(self.c)],
            [drop(self.b), come_in(self.a)],
            [],
        ]

    def test_not_before_what_it_waits_for_has_happened(self):
        event = Event("gradient", 1)
        now, later = step(self.a), step(self.b, awaits=(event,))
        pager = Pager(0, PLENTY, Residency.LRU, Writeback.DROP, 1)
        pager.make_ready(now, [later])
        assert pager.prefetch(now, [later], happened=()) == []
        assert pager.prefetch(now, [later], happened={event}) == [come_in(self.b)]

    def test_not_past_a_step_that_changes_what_the_home_copies_are(self):
        update = step(self.a, changes=(self.a,), stale=(self.b,), goes_out=(self.a,))
        assert self.before(PLENTY, Residency.LRU, 2, update, step(self.b), step(self.c)) == [
            [come_in(self.a)],
            [come_in(self.b), come_in(self.c)],
            [],
        ]
        assert self.before(PLENTY, Residency.LRU, 2, step(self.c), update, step(self.b)) == [
            [come_in(self.c), come_in(self.a)],
            [],
            [come_in(self.b)],
        ]


class TestPassing:
    """What goes to another GPU and what comes from one."""

    def test_what_is_sent_stays_until_its_receiver_takes_it(self):
        x, a = tensor(4), tensor(4)
        pager = Pager(1, 10, Residency.NONE, Writeback.ALWAYS)
        first, second = step(a, x, creates=(x,), sends=x), step(a, workspace_bytes=3)
        pager.make_ready(first, [second])
        assert pager.settle(first, [second]) + pager.flush() == [go_out(a)]
        assert pager.resident == (x,)
        assert not pager.has_room(second)
        with pytest.raises(DoesNotFit, match="touches, the workspace, and 4 B that wait to be sent") as refusal:
            pager.make_ready(second)
        assert (refusal.value.gpu, refusal.value.needed, refusal.value.cap) == (1, 11, 10)
        pager.release(x)
        assert pager.held_bytes == 0
        assert pager.make_ready(second) == [come_in(a)]

    def test_what_is_received_arrives_once_and_then_lives_like_what_was_made_here(self):
        x, a = tensor(4), tensor(8)
        pager = Pager(0, 8, Residency.LRU, Writeback.DROP)
        played = play(pager, [step(x, receives=x), step(a), step(x, receives=x, dies=(x,))])
        assert played == [
            ([Move(Action.ARRIVE, x)], []),
            ([go_out(x), come_in(a)], []),
            ([drop(a), come_in(x)], [drop(x)]),
        ]


# An independent pager, and sequences on which the two must agree.


@dataclass
class Page:
    used: tuple[int, int]  # step, position in it
    dirty: bool


class NaivePager:
    """Looks at times of last use only, and makes all the room a step needs at once."""

    def __init__(self, cap: int, residency: Residency, writeback: Writeback, depth: int) -> None:
        self.cap, self.residency, self.writeback, self.depth = cap, residency, writeback, depth
        self.pages: dict[Tensor, Page] = {}

    def run(
        self, steps: list[PagedStep], happened: set[Event]
    ) -> list[tuple[list[Tensor], list[tuple[Tensor, bool]], set[Tensor]]]:
        """Per step: what came in, what left (and if it was written), what was there after the step."""
        log = []
        for now, each in enumerate(steps):
            window = steps[now : now + 1 + self.depth]
            arrivals = [t for t in each.touches if t not in self.pages and t not in each.creates]
            left = self.oldest_until_it_fits(each, window)
            for position, touched in enumerate(each.touches):
                dirty = touched in each.creates or touched in each.changes
                dirty = dirty or (touched in self.pages and self.pages[touched].dirty)
                self.pages[touched] = Page((now, position), dirty)
            self.fetch(now, window, happened, arrivals, left)
            for dead in each.dies + each.stale:
                if self.pages.pop(dead, None):
                    left.append((dead, False))
            left += [self.leave(t) for t in each.goes_out]
            ahead = {t for later in window[1:] for t in later.touches}
            after = steps[now + 1].touches if now + 1 < len(steps) else ()
            kept = {
                Residency.NONE: {*each.hands_on, *ahead},
                Residency.NEXT: {*after, *ahead},
                Residency.LRU: set(self.pages),
            }
            left += [self.leave(t) for t in self.by_age() if t not in kept[self.residency]]
            log.append((arrivals, left, set(self.pages)))
        log[-1][1].extend(self.leave(t) for t in self.by_age())
        log[-1][2].clear()
        return log

    def oldest_until_it_fits(self, each: PagedStep, window: list[PagedStep]) -> list[tuple[Tensor, bool]]:
        left: list[tuple[Tensor, bool]] = []
        promised = {t for later in window for t in later.touches}
        while self.size({*self.pages, *each.touches}) + each.workspace_bytes > self.cap:
            old = [t for t in self.by_age() if t not in each.touches]
            left.append(self.leave(min(old, key=lambda t: (t in promised, self.pages[t].used))))
        return left

    def fetch(
        self,
        now: int,
        window: list[PagedStep],
        happened: set[Event],
        arrivals: list[Tensor],
        left: list[tuple[Tensor, bool]],
    ) -> None:
        for at in range(1, len(window)):
            before, later = window[:at], window[at]
            if before[-1].stale or before[-1].goes_out or not {*later.awaits} <= happened:
                return
            met = {t for each in before for t in each.touches}
            new = [t for t in later.touches if t not in met | {*later.creates}]
            for index, wanted in enumerate(new):
                needed = self.size(met.union(new[: index + 1])) + max(each.workspace_bytes for each in before)
                if needed > self.cap:
                    return
                while wanted not in self.pages:
                    if self.size({*self.pages, wanted}) + window[0].workspace_bytes <= self.cap:
                        self.pages[wanted] = Page((now, len(window[0].touches) + len(arrivals)), dirty=False)
                        arrivals.append(wanted)
                        break
                    spare = [t for t in self.by_age() if not any(t in each.touches for each in window)]
                    if not spare:
                        return
                    left.append(self.leave(spare[0]))

    def size(self, tensors: set[Tensor]) -> int:
        return sum(t.bytes for t in tensors)

    def by_age(self) -> list[Tensor]:
        return sorted(self.pages, key=lambda t: self.pages[t].used)

    def leave(self, leaving: Tensor) -> tuple[Tensor, bool]:
        page = self.pages.pop(leaving)
        return leaving, page.dirty or self.writeback is Writeback.ALWAYS


def access_sequence(seed: int, length: int) -> list[PagedStep]:
    """Steps that create, change, kill and outdate tensors at random; a shorter one is the start of a longer one."""
    draw = random.Random(seed)
    alive = [tensor(draw.randint(1, 9)) for _ in range(draw.randint(1, 8))]
    steps: list[PagedStep] = []

    def some(pool: Sequence[Tensor], most: int) -> list[Tensor]:
        return draw.sample(pool, draw.randint(0, min(most, len(pool))))

    for _ in range(length):
        created = [tensor(draw.randint(1, 9)) for _ in range(draw.choice((0, 0, 1, 2)))]
        touches = some(alive, 4) + created
        draw.shuffle(touches)
        dies = some(touches, 2)
        untouched = [t for t in alive if t not in touches]
        alive = [t for t in alive + created if t not in dies]
        steps.append(
            step(
                *touches,
                creates=tuple(created),
                changes=tuple(t for t in some(touches, 3) if t not in created),
                dies=tuple(dies),
                goes_out=tuple(t for t in some(touches, 1) if t not in dies) if draw.random() < 0.5 else (),
                stale=tuple(some(untouched, 1)) if draw.random() < 0.5 else (),
                awaits=(Event("gradient", draw.randint(0, 9)),) if draw.random() < 0.2 else (),
                workspace_bytes=draw.randint(0, 5),
            )
        )
        if len(steps) > 1:
            handed = [t for t in steps[-2].touches if t in touches and t not in steps[-2].goes_out]
            steps[-2] = replace(steps[-2], hands_on=tuple(some(handed, 2)))
    return steps


def smallest_cap(steps: list[PagedStep]) -> int:
    return max(1, *(sum(t.bytes for t in each.touches) + each.workspace_bytes for each in steps))


SPARE, DEPTHS = st.integers(0, 60), st.sampled_from((0, 0, 1, 2, 5))
PAGERS = (SEEDS, LENGTHS, SPARE, st.sampled_from(Residency), st.sampled_from(Writeback), DEPTHS)


@given(*PAGERS, st.sets(st.builds(Event, st.just("gradient"), st.integers(0, 9))))
def test_it_decides_as_an_independent_pager_does(seed, length, spare, residency, writeback, depth, happened):
    steps = access_sequence(seed, length)
    cap = smallest_cap(steps) + spare
    pager = Pager(0, cap, residency, writeback, depth)
    expected = NaivePager(cap, residency, writeback, depth).run(steps, happened)
    for (arrivals, left, there), (now, following) in zip(expected, with_following(steps, max(1, depth)), strict=True):
        moves = pager.make_ready(now, following) + pager.prefetch(now, following, happened)
        moves += pager.settle(now, following) + (pager.flush() if not following else [])
        assert [m.tensor for m in moves if m.action is Action.COME_IN] == arrivals
        assert [(m.tensor, m.action is Action.GO_OUT) for m in moves if m.action is not Action.COME_IN] == left
        assert set(pager.resident) == there
        assert pager.held_bytes == sum(t.bytes for t in there)


@given(*PAGERS)
def test_it_never_holds_more_than_its_cap(seed, length, spare, residency, writeback, depth):
    steps = access_sequence(seed, length)
    cap = smallest_cap(steps) + spare
    pager = Pager(0, cap, residency, writeback, depth)
    there: set[Tensor] = set()

    def follow(moves: list[Move]) -> None:
        for action, moved in moves:
            assert (moved in there) is (action is not Action.COME_IN)
            (there.add if action is Action.COME_IN else there.remove)(moved)
            assert sum(t.bytes for t in there) <= cap

    for now, following in with_following(steps, pager.looks_ahead):
        follow(pager.make_ready(now, following))
        there.update(now.creates)
        assert there >= set(now.touches)
        follow(pager.prefetch(now, following, happened=()))
        assert sum(t.bytes for t in there) + now.workspace_bytes <= cap
        follow(pager.settle(now, following))
    follow(pager.flush())
    assert not there


def moved_bytes(pager: Pager, steps: list[PagedStep], action: Action) -> int:
    return sum(m.tensor.bytes for before, after in play(pager, steps) for m in before + after if m.action is action)


@given(SEEDS, LENGTHS, SPARE, st.sampled_from(Writeback))
def test_lru_never_moves_more_than_none(seed, length, spare, writeback):
    steps = access_sequence(seed, length)
    cap = smallest_cap(steps) + spare
    for action in (Action.COME_IN, Action.GO_OUT):
        lru, none = (
            moved_bytes(Pager(0, cap, each, writeback), steps, action) for each in (Residency.LRU, Residency.NONE)
        )
        assert lru <= none


@given(SEEDS, LENGTHS, SPARE, st.sampled_from((Residency.NONE, Residency.NEXT)), st.sampled_from(Writeback), DEPTHS)
def test_prefetching_never_moves_more_where_little_is_kept(seed, length, spare, residency, writeback, depth):
    steps = access_sequence(seed, length)
    cap = smallest_cap(steps) + spare
    for action in (Action.COME_IN, Action.GO_OUT):
        early, late = (moved_bytes(Pager(0, cap, residency, writeback, each), steps, action) for each in (depth, 0))
        assert early <= late
