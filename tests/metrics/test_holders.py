"""Metrics of sessions and tenants, and the limit on their labels."""

from __future__ import annotations

from collections import Counter

from scraping import POOL, Samples, by_label, compute, scrape, scrape_until, value

from kvservice.client import KVClient
from kvservice.launch import Daemon

HELD = ("sequences", "tokens", "blocks")


def held(samples: Samples, label: str, whose: str) -> tuple[float, ...]:
    return tuple(by_label(samples, f"kvservice_{label}_{what}", label)[whose] for what in HELD)


def test_sessions_are_counted_by_their_ends(free_port: int) -> None:
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", session_grace_s=0.1, **POOL) as daemon,
        KVClient(daemon.address) as client,
    ):
        with client.session(), client.session():
            assert counted(scrape(free_port)) == (2, 2, {"closed": 0, "lost": 0})
        client.session().detach()  # and no client resumes it
        samples = scrape_until(free_port, lambda found: value(found, "kvservice_sessions") == 0)
        assert counted(samples) == (0, 3, {"closed": 2, "lost": 1})


def counted(samples: Samples) -> tuple[float, float, dict[str, float]]:
    closed = by_label(samples, "kvservice_sessions_closed_total", "reason")
    return value(samples, "kvservice_sessions"), value(samples, "kvservice_sessions_opened_total"), closed


def test_tenants_have_labels_up_to_a_limit(free_port: int) -> None:
    tenants = ("acme", "", "late", "later", "other")
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", max_labels=2, **(POOL | {"num_blocks": 64})) as daemon,
        KVClient(daemon.address) as client,
    ):
        sessions = [client.session(tenant=tenant) for tenant in tenants]
        for n, session in enumerate(sessions):
            compute(session, list(range(4 + n)))  # the first block is common to all
            session.fork(session.allocate([1000 + n]))
        samples, stats = scrape(free_port), client.stats()
        # sequences, tokens, entries of block tables
        assert held(samples, "tenant", "acme") == (3, 4 + 2, 3)
        assert held(samples, "tenant", "") == (3, 5 + 2, 4)
        assert held(samples, "tenant", "other") == (9, 6 + 7 + 8 + 3 * 2, 3 * 4)
        assert set(by_label(samples, "kvservice_tenant_tokens", "tenant")) == {"acme", "", "other"}
        assert sum(by_label(samples, "kvservice_tenant_tokens", "tenant").values()) == stats.tokens
        assert sum(by_label(samples, "kvservice_tenant_sequences", "tenant").values()) == stats.sequences
        spent = tokens_of_tenants(samples)
        assert spent["computed_tokens"] == {"acme": 4, "": 1, "other": 2 + 3 + 4}
        assert spent["prefix_cache_query_tokens"] == {"acme": 5, "": 6, "other": 7 + 8 + 9}
        assert spent["prefix_cache_hit_tokens"] == {"acme": 0, "": 4, "other": 3 * 4}
        assert value(samples, "kvservice_computed_tokens_total") == sum(spent["computed_tokens"].values())

        for session in sessions:
            session.close()
            assert tokens_of_tenants(scrape(free_port)) == spent  # the counts remain
        samples = scrape(free_port)
        for what in HELD:
            assert by_label(samples, f"kvservice_tenant_{what}", "tenant") == {}


def tokens_of_tenants(samples: Samples) -> dict[str, dict[str, float]]:
    names = ("computed_tokens", "prefix_cache_query_tokens", "prefix_cache_hit_tokens")
    return {name: by_label(samples, f"kvservice_tenant_{name}_total", "tenant") for name in names}


def test_a_tenant_of_the_name_that_stands_for_all_others_is_one_of_them(free_port: int) -> None:
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", max_labels=2, **POOL) as daemon,
        KVClient(daemon.address) as client,
    ):
        for tenant in ("other", "a", "b", "c", "other"):
            with client.session(tenant=tenant) as kv:
                kv.allocate([1, 2, 3])
        queries = tokens_of_tenants(scrape(free_port))["prefix_cache_query_tokens"]
        assert queries == {"other": 9, "a": 3, "b": 3}


def test_session_names_have_labels_up_to_a_limit(free_port: int) -> None:
    names = ("engine", "", "engine", "third", "fourth", "other")
    with (
        Daemon(http_address=f"127.0.0.1:{free_port}", max_labels=3, **(POOL | {"num_blocks": 64})) as daemon,
        KVClient(daemon.address) as client,
    ):
        sessions = [client.session(name) for name in names]
        tokens: Counter[str] = Counter()
        for n, (name, session) in enumerate(zip(names, sessions, strict=True)):
            session.allocate([100 * n] * (n + 5))
            tokens[name if name in ("engine", "", "third") else "other"] += n + 5
        samples = scrape(free_port)
        assert by_label(samples, "kvservice_session_tokens", "session") == tokens
        assert held(samples, "session", "engine") == (2, 5 + 7, 4)
        assert held(samples, "session", "other") == (2, 9 + 10, 3 + 3)
        sessions[1].close()  # leaves room for a name
        samples = scrape(free_port)
        assert by_label(samples, "kvservice_session_blocks", "session") == {
            "engine": 4,
            "third": 2,
            "fourth": 3,
            "other": 3,
        }
        for session in sessions:
            session.close()


def test_a_name_is_exported_unchanged(shared: tuple[Daemon, int]) -> None:
    daemon, port = shared
    for name in ('quo"te', "back\\slash\\n", "{label}", "\N{SNOWMAN}" * 64, "white space "):
        with KVClient(daemon.address) as client, client.session(name, tenant=name) as kv:
            kv.allocate([1])
            samples = scrape(port)
            assert by_label(samples, "kvservice_session_tokens", "session") == {name: 1}
            assert by_label(samples, "kvservice_tenant_tokens", "tenant") == {name: 1}
