"""The pool of pages by itself: against lists of entries, whatever is written, dropped, moved and copied."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from evictbench.cache.buffers import ByteCounter
from evictbench.cache.paged.attention import Checked, attend_chunk, attend_decode, attend_with_flex
from evictbench.cache.paged.pool import PAGE, SPARE, PagePool
from evictbench.cache.paged.stack import StackedPools
from evictbench.policy.step import NEVER

OWNERS, HEAD_DIM = 4, 8
LIKE = torch.empty(0, HEAD_DIM, dtype=torch.float64)


@dataclass
class Books:
    """The same in plain lists: position to (key, expiry), by owner; and the bytes as the pool counts them."""

    held: list[dict[int, tuple[float, int]]] = field(default_factory=lambda: [{} for _ in range(OWNERS)])
    bytes: ByteCounter = field(default_factory=ByteCounter)


def vectors(keys: torch.Tensor) -> torch.Tensor:
    return keys.double()[..., None].expand(*keys.shape, HEAD_DIM)


def check(pool: PagePool, books: Books, following: int) -> None:
    assert pool.nbytes() == books.bytes.held
    used = [page for table in pool.tables for page in table]
    assert sorted([*used, *pool.spare]) == list(range(pool.pages))
    for owner, held in enumerate(books.held):
        alive = {position: entry for position, entry in held.items() if entry[1] > following}
        positions, expiry = pool.entries(owner, "positions"), pool.entries(owner, "expiry")
        keys, values = pool.entries(owner, "keys")[:, 0], pool.entries(owner, "values")[:, 0]
        rows = zip(positions.tolist(), expiry.tolist(), keys.tolist(), values.tolist(), strict=True)
        found = {position: (key, end) for position, end, key, _ in rows if end > following}
        assert found == alive
        assert torch.equal(keys, values)
        assert bool((positions[: pool.length[owner]] >= 0).all())
        assert bool((positions[pool.length[owner] :] == -1).all())
        assert bool((expiry[pool.length[owner] :] == 0).all())
        assert len(pool.tables[owner]) == -(-int(pool.length[owner]) // PAGE)


@pytest.mark.engine
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(st.one_of(st.integers(2, 40), st.just(1), st.just(1), st.just(0)), min_size=1, max_size=40),
    life=st.integers(1, 60),
    seed=st.integers(0, 1000),
)
def test_the_pool_holds_what_the_lists_hold(steps: list[int], life: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    books = Books()
    pool = PagePool(OWNERS, LIKE, books.bytes)
    stack = StackedPools([pool])
    now = 0
    for new in steps:
        if new == 0:
            pool.trim()
            check(pool, books, now)
            continue
        positions = torch.arange(now, now + new, dtype=torch.int32)
        drawn = positions + torch.randint(1, life + 1, (OWNERS, new), generator=generator)
        expiry = torch.where(torch.rand((OWNERS, new), generator=generator) < 0.7, drawn, NEVER).to(torch.int32)
        expiry[:, -1] = NEVER
        keys = torch.rand((OWNERS, new), generator=generator)
        entries = {
            "keys": vectors(keys),
            "values": vectors(keys),
            "positions": positions.expand(OWNERS, -1),
            "expiry": expiry,
        }
        if now:
            decided = torch.where(torch.rand(OWNERS, generator=generator) < 0.5, now + life, NEVER).to(torch.int32)
            pool.set_newest_expiry(slice(0, OWNERS), decided)
            for owner, held in enumerate(books.held):
                held[now - 1] = (held[now - 1][0], int(decided[owner]))
        for owner, held in enumerate(books.held):
            for i in range(new):
                held[now + i] = (float(vectors(keys)[owner, i, 0]), int(expiry[owner, i]))
        now += new
        if new == 1 and now > 1:
            wanting, seen = stack.wants_page(OWNERS)
            assert seen[0].tolist() == pool.visible.tolist()
            pool.take(dict.fromkeys(wanting[0].nonzero()[:, 0].tolist(), 1))
            _, slots = stack.append(positions.expand(OWNERS))
            for name in ("keys", "values"):
                pool.buffers[name].flatten(0, 1)[slots] = entries[name][:, 0]
            stack.update_visibility(torch.full((OWNERS,), now, dtype=torch.int32))
        else:
            pool.write_chunk(0, entries, now)
        check(pool, books, now)
        alive = [sum(end > now for _, end in held.values()) for held in books.held]
        assert pool.visible.tolist() == alive
    used = pool.pages - len(pool.spare)
    pool.trim()
    assert len(pool.spare) <= max(1, SPARE * used)


def filled(lengths: list[int], seed: int = 0) -> tuple[PagePool, Books]:
    """A pool of owners that hold so many entries each."""
    books = Books()
    pool = PagePool(len(lengths), LIKE, books.bytes)
    generator = torch.Generator().manual_seed(seed)
    for owner, length in enumerate(lengths):
        entries = {
            "keys": torch.randn((1, length, HEAD_DIM), generator=generator, dtype=torch.float64),
            "values": torch.randn((1, length, HEAD_DIM), generator=generator, dtype=torch.float64),
            "positions": torch.arange(length, dtype=torch.int32)[None],
            "expiry": torch.full((1, length), NEVER, dtype=torch.int32),
        }
        pool.write_chunk(owner, entries, length)
    return pool, books


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_token_attends_to_its_own_pages(dtype: torch.dtype) -> None:
    lengths = [1, 37, 16, 300]
    pool, _ = filled(lengths)
    for name in ("keys", "values"):
        pool.buffers[name] = pool.buffers[name].to(dtype)
    pool.take({1: 1})  # a page with nothing in it
    pool.give_back({1: len(pool.tables[1]) - 1})
    query = torch.randn((2, 6, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1)).to(dtype)
    output = attend_decode(pool, query, torch.full((4,), 1000, dtype=torch.int32), 0.5)
    assert output.dtype == dtype
    for owner, length in enumerate(lengths):
        keys, values = (pool.entries(owner, name)[:length].double() for name in ("keys", "values"))
        own = query.view(4, 3, HEAD_DIM)[owner].double()
        expected = (own @ keys.T * 0.5).softmax(-1) @ values
        tolerance = 1e-12 if dtype == torch.float64 else 20 * torch.finfo(dtype).eps
        torch.testing.assert_close(output.view(4, 3, HEAD_DIM)[owner].double(), expected, atol=tolerance, rtol=0)


def test_logits_of_any_size_and_owners_apart() -> None:
    pool, _ = filled([40, 40])
    pool.buffers["keys"].mul_(1e4)
    query = torch.randn((1, 2, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    query[:, 1] *= 1e-6
    output = attend_decode(pool, query, torch.full((2,), 100, dtype=torch.int32), 1.0)
    for owner in range(2):
        keys, values = (pool.entries(owner, name)[:40] for name in ("keys", "values"))
        torch.testing.assert_close(output[0, owner, 0], (keys @ query[0, owner, 0]).softmax(-1) @ values)


def test_a_first_chunk_without_expiries_is_plain_causal_attention() -> None:
    empty = PagePool(2, LIKE, ByteCounter())
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn((2, 20, HEAD_DIM), generator=generator, dtype=torch.float64) for _ in range(3))
    for never in (NEVER, 100):
        entries = {
            "keys": keys,
            "values": values,
            "positions": torch.arange(20, dtype=torch.int32).expand(2, -1),
            "expiry": torch.full((2, 20), never, dtype=torch.int32),
        }
        plain = attend_chunk(empty, 0, query, entries, 0.3)
        entries["expiry"][:, :-1] = 19 if never == 100 else NEVER
        entries["expiry"][0, 0] = 19
        masked = attend_chunk(empty, 0, query, entries, 0.3)
        torch.testing.assert_close(plain[:, :19], masked[:, :19], atol=1e-12, rtol=0)
        assert not torch.allclose(plain[0, 19], masked[0, 19])


def test_owners_move_and_are_copied() -> None:
    pool, books = filled([20, 3, 50, 17])
    before = {owner: pool.entries(owner, "keys") for owner in range(4)}
    copy_bytes = ByteCounter()
    copy = PagePool(8, LIKE, copy_bytes)
    copy.copy_from(pool, 4)
    for owner in range(4):
        assert torch.equal(copy.entries(4 + owner, "keys"), before[owner])
        assert int(copy.length[4 + owner]) == int(pool.length[owner])
        newest = int(copy.newest[4 + owner])
        assert int(copy.buffers["positions"].view(-1)[newest]) == int(pool.length[owner]) - 1
    assert copy.nbytes() == copy_bytes.held
    pool.move_owners(2, 0, 2)
    assert torch.equal(pool.entries(0, "keys"), before[2])
    assert torch.equal(pool.entries(1, "keys"), before[3])
    assert pool.tables[2] == pool.tables[3] == []
    pages = pool.pages
    pool.trim()
    assert pool.pages == pages - 3
    assert torch.equal(pool.entries(0, "keys"), before[2])
    assert pool.nbytes() == books.bytes.held


def test_the_pool_grows_by_little_and_its_stock_is_small() -> None:
    pool, _ = filled([1600, 1600])
    used = pool.pages
    for _ in range(200):
        pool.take({0: 1})
        used += 1
        assert pool.pages <= used * (1 + SPARE)


def test_flex_attention_over_pages_sees_the_same() -> None:
    pool, _ = filled([1, 37, 16, 300])
    pool.buffers["expiry"].view(-1)[pool.table(3) * PAGE + 3] = 50
    query = torch.randn((2, 6, 1, HEAD_DIM), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    positions = torch.tensor([1000, 1000, 1000, 50], dtype=torch.int32)
    found = attend_with_flex(pool, query, positions, 0.5, compiled=False)
    torch.testing.assert_close(found, attend_decode(pool, query, positions, 0.5), atol=1e-12, rtol=0)
    pool.take({1: 1, 2: 1})  # in place of tables made anew
    for owner, page in enumerate(pool.tables_on_device(4)[1].tolist()):
        assert page[: len(pool.tables[owner])] == pool.tables[owner]
    assert pool.tables_on_device(4)[0].tolist() == [len(table) for table in pool.tables]
    pool.give_back({1: 3, 2: 1})
    pool.move_owners(2, 0, 2)
    query, positions = query[:1], positions[2:]
    found = attend_with_flex(pool, query, positions, 0.5, compiled=False)
    torch.testing.assert_close(found, attend_decode(pool, query, positions, 0.5), atol=1e-12, rtol=0)


def test_a_kernel_that_fails_or_differs_is_not_used() -> None:
    pool, _ = filled([20, 37])
    query, positions = torch.ones((1, 2, 1, HEAD_DIM), dtype=torch.float64), torch.full((2,), 99, dtype=torch.int32)
    calls: list[str] = []

    def right(*given: object) -> torch.Tensor:
        calls.append("right")
        return attend_decode(*given)  # type: ignore[arg-type]

    def wrong(*given: object) -> torch.Tensor:
        calls.append("wrong")
        return attend_decode(*given) + 1e-3  # type: ignore[arg-type]

    def broken(*given: object) -> torch.Tensor:
        raise RuntimeError("no kernel image")

    expected = attend_decode(pool, query, positions, 0.5)
    for kernel, sentence in ((wrong, "it differs by 0.001"), (broken, r"it does not run \(RuntimeError\)")):
        checked = Checked(kernel, attend_decode)
        with pytest.warns(UserWarning, match=sentence):
            assert torch.equal(checked(pool, query, positions, 0.5), expected)
        calls.clear()
        assert torch.equal(checked(pool, query, positions, 0.5), expected)
        assert not calls
    checked = Checked(right, attend_decode)
    checked(pool, query, positions, 0.5)
    assert torch.equal(checked(pool, query, positions, 0.5), expected)
    assert calls == ["right", "right"]
