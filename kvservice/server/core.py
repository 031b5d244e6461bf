"""The parts of the daemon that hold its state: empty, or taken over from an earlier process."""

from __future__ import annotations

import contextlib
import errno
import gc
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from kvservice.blocks import BlockManager, KeptMaps, Slices
from kvservice.blocks.slices import finish
from kvservice.blocks.state import FLAGS, LENGTH, NAMESPACE, NUM_COMPUTED, SCHEDULED, STEP
from kvservice.config import GIB, ServeConfig
from kvservice.devices import Device, open_device
from kvservice.engine import CacheEngine
from kvservice.errors import InvalidArgumentError, KVServiceError, ResourceExhaustedError
from kvservice.keeper.private_paths import private_folder, why_unusable
from kvservice.keeper.processes import is_from_outside
from kvservice.kept import KeptFiles, KeptState, KeptStateError, Section
from kvservice.kept.report import FIRST_START, REFUSED, TAKEN_OVER, UPGRADE, KeptCounts, LostCounts, RestartReport
from kvservice.saved import SavedFiles, SessionFiles
from kvservice.server.loop import Clock
from kvservice.server.sessions.registry import SessionRegistry
from kvservice.server.sessions.saved import SavedSessions
from kvservice.server.sessions.session import SessionMemory
from kvservice.server.tenants import Tenants
from kvservice.server.tiering.store import ServerStore, open_store

logger = logging.getLogger(__name__)

# The variable in which the keeper says how the latest processes ended that never served.
ENDED_EARLY: Final = "KVSERVICE_ENDED_EARLY"


def state_identity(config: ServeConfig) -> dict[str, Any]:
    """Return all options that decide the meaning of the kept bytes, as values of JSON by name."""
    names = (
        "device",
        "num_blocks",
        "block_size",
        "enable_prefix_caching",
        "max_sequences",
        "max_sequence_tokens",
        "max_sessions",
        "max_labels",
        "store_gib",
        "max_store_namespaces",
    )
    return {
        **asdict(config.layout),
        **{name: getattr(config, name) for name in names},
        # Before there were tenants, clients chose the names of theirs: what was kept then is nobody's now.
        **({"tenants": True} if config.tenants else {}),
        # Earlier versions did not name the weights.
        **({"weights": config.weights} if config.weights else {}),
        "pool_blocks": config.pool_blocks,
        "swap_blocks": config.swap_blocks,
        "kv_scales": _digest(config.kv_scales),
        # Memory that others could write once cannot be protected from them later.
        "share_pool for writing": config.share_pool == "write",
        "share_store for writing": config.shares_store == "write",
    }


def content_identity(config: ServeConfig) -> dict[str, Any]:
    """Return the options that decide the meaning of a block's bytes, in any daemon, as values of JSON by name."""
    return {**asdict(config.layout), "kv_scales": _digest(config.kv_scales), "weights": config.weights}


def _digest(path: str) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16] if path else ""
    except OSError:  # the device names the option in its error
        return ""


@dataclass(frozen=True)
class Core:
    """The state of the daemon, and what works on it. `report` has no times yet."""

    kept: KeptState
    device: Device
    engine: CacheEngine
    store: ServerStore | None
    sessions: SessionRegistry
    saved: SavedSessions
    report: RestartReport

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """A part of the start, after the state was taken over or created. If it fails for a reason that another start
        may not have, that does not count against the state."""
        try:
            yield
        except Exception as error:
            if _lacks_something(error):
                self.kept.end_attempt()
            raise

    def check_in_slices(self) -> Slices[bool]:
        """Check all bookkeeping. Returns whether the pass was complete. Raises InternalError."""
        return _check_in_slices(self.engine, self.store)

    def close(self) -> None:
        """End the threads of the device and of the disk. The state stays as it is."""
        self.sessions.lanes.close()
        self.saved.close()
        self.device.close()


def open_core(
    config: ServeConfig,
    files: KeptFiles,
    environ: Mapping[str, str] = os.environ,
    clock: Clock | None = None,
    wall: Callable[[], float] = time.time,
    tenants: Tenants | None = None,
) -> Core:
    """Take over the state in `files`, or begin with an empty one if there is none, if it belongs to another
    configuration, or if it is corrupt. A state that is refused is dropped, and what tells of its damage is set aside.
    Called in the event loop. `wall` returns seconds since 1970.

    Raises InvalidArgumentError, ResourceExhaustedError, OSError and MemoryError if the daemon cannot start with its
    configuration, or lacks something; a state that was there stays for the next start.
    """
    identity = state_identity(config)
    was_killed = is_from_outside(environ.get(ENDED_EARLY, "").rpartition(",")[2])
    kept = KeptState.open(files, identity, was_killed=was_killed)
    refused = kept.refused
    if kept.taken:
        try:
            report = _report(environ, files, TAKEN_OVER, ended_in_order=kept.clean)
            return _open(config, kept, report, clock, wall, tenants)
        except Exception as error:  # corrupt state may break anything
            if _lacks_something(error):
                kept.end_attempt()
                raise
            refused = f"it is corrupt: {error or type(error).__name__}"
            logger.exception("the state of the process before cannot be taken over")
        kept.discard()
        del kept
        gc.collect()  # the refused pool may be most of the machine's memory
        kept = KeptState.open(files, identity)
    if refused:
        logger.warning("the state of the process before is refused, all sessions and K/V are lost: %s", refused)
    report = _report(environ, files, REFUSED if refused else FIRST_START, refused)
    return _open(config, kept, report, clock, wall, tenants)


def _lacks_something(error: Exception) -> bool:
    """Return whether a start failed for a reason outside of the state: memory, descriptors, a disk, an option."""
    if isinstance(error, KVServiceError):
        option = error.field.partition(",")[0]
        return isinstance(error, ResourceExhaustedError) or option in ServeConfig.model_fields
    if isinstance(error, OSError):
        return error.errno not in (errno.EINVAL, errno.ENXIO, errno.EOVERFLOW)
    return isinstance(error, MemoryError)


def _report(
    environ: Mapping[str, str], files: KeptFiles, outcome: str, reason: str = "", *, ended_in_order: bool = False
) -> RestartReport:
    """Return the report without counts and times. systemd does not say how the process before ended."""
    return RestartReport(
        outcome=outcome,
        is_kept=files.is_kept,
        ended=environ.get("KVSERVICE_ENDED", UPGRADE if ended_in_order else ""),
        reason=reason,
        num_restarts=int(environ.get("KVSERVICE_RESTARTS", "0")),
    )


def _open(
    config: ServeConfig,
    kept: KeptState,
    report: RestartReport,
    clock: Clock | None,
    wall: Callable[[], float],
    tenants: Tenants | None,
) -> Core:
    """Open all parts on this state, and recover what an earlier process left. Raises InternalError if that is
    corrupt."""
    device = open_device(config, kept)
    files = None
    try:
        files = _open_saved_files(config, device, wall, time.monotonic if clock is None else clock.time)
        engine = CacheEngine(config, device, kept.arrays, _block_maps(kept))
        store = open_store(config, engine.journal, kept, clock)
        section = kept.table.section
        memory = SessionMemory.of(config, kept.arrays, section(Section.SESSIONS), section(Section.POOL_WRITERS))
        blocks = None if store is None else store.blocks
        sessions = SessionRegistry(config, engine.manager, device, memory, clock, blocks, tenants)
        if not kept.taken:
            after = f" after {report.ended}" if report.ended else ""
            sessions.began = (
                f"this daemon began empty{after}: sessions from before it, unless they were saved, are gone"
            )
        saved = SavedSessions(config, engine.manager, sessions, files)
        if kept.taken:
            try:
                counts, lost = _recover(kept, engine.manager, sessions)
                finish(_check_in_slices(engine, store))
                if store is not None:
                    own = {one.session_id: one.store for one in sessions if one.store is not None}
                    counts = replace(counts, store_blocks=store.recover(own).blocks)
                # Now that all of a session is known, what it had reserved in the store is held for its living writers.
                sessions.apply_tenants()
                num_sequences = sum(len(one.namespace) for one in sessions)
                counts = replace(counts, sessions=len(sessions), sequences=num_sequences)
            except BaseException as error:
                sessions.writers.close()
                if isinstance(error, KVServiceError):  # the state is at fault, although the error may name an option
                    raise KeptStateError(str(error)) from error
                raise
            # systemd does not say how the process before ended, but the state does.
            ended = report.ended or (UPGRADE if kept.clean else "")
            report = replace(report, kept=counts, lost=lost, ended=ended)
    except BaseException:
        if files is not None:
            files.close()
        device.close()
        raise
    return Core(kept, device, engine, store, sessions, saved, report)


def _open_saved_files(
    config: ServeConfig, device: Device, wall: Callable[[], float], clock: Callable[[], float]
) -> SessionFiles | None:
    """Open the folder of saved sessions, if there is one. Raises InvalidArgumentError."""
    if not config.disk or not config.disk_sessions_gib:
        return None
    folder = Path(config.disk) / "sessions"
    began_s = time.monotonic()
    try:
        files = SavedFiles(private_folder(folder), int(config.disk_sessions_gib * GIB), wall, clock)
    except BlockingIOError:
        raise InvalidArgumentError(f"{folder} is in use by another daemon", field="disk") from None
    except OSError as error:
        raise InvalidArgumentError(why_unusable(error, folder), field="disk") from None
    logger.info(
        "saved sessions are in %s: %d are found after %.2f s, with %.2f of %.2f GiB",
        folder, files.num_sessions, time.monotonic() - began_s, files.used_bytes / GIB, config.disk_sessions_gib,
    )  # fmt: skip
    layout = config.layout
    return SessionFiles(files, device, layout.block_size, layout.block_bytes, content_identity(config), wall)


def _block_maps(kept: KeptState) -> KeptMaps:
    section = kept.table.section
    return KeptMaps(
        section(Section.EXTRA_KEYS), section(Section.PINS), section(Section.LOST_SEQUENCES), section(Section.STEPS),
        section(Section.SESSION_WRITERS), section(Section.QUARANTINE), kept.table.reserve,
    )  # fmt: skip


def _recover(kept: KeptState, manager: BlockManager, sessions: SessionRegistry) -> tuple[KeptCounts, LostCounts]:
    """Recover sessions and sequences. Returns what was kept besides them, and what was lost."""
    open_steps, schedulers = _open_work(manager)
    recovery = sessions.recover(with_steps=kept.clean)
    steps_kept = min(open_steps, recovery.num_steps)  # complete steps are kept too, but nobody waits for them
    counts = KeptCounts(steps=steps_kept, cached_blocks=recovery.num_cached_blocks, pins=recovery.num_pins)
    lost = LostCounts(sequences=recovery.num_lost, steps=open_steps - steps_kept, schedulers=schedulers)
    return counts, lost


def _open_work(manager: BlockManager) -> tuple[int, int]:
    """Return the number of steps that the earlier process left incomplete, and of its schedulers with sequences."""
    states = manager.sequences.states
    states = states[states[:, NAMESPACE] != 0]
    incomplete = states[(states[:, STEP] != 0) & (states[:, NUM_COMPUTED] < states[:, LENGTH])]
    scheduled = states[states[:, FLAGS] & SCHEDULED != 0]
    steps = set(zip(incomplete[:, NAMESPACE].tolist(), incomplete[:, STEP].tolist(), strict=True))
    return len(steps), len(set(scheduled[:, NAMESPACE].tolist()))


def _check_in_slices(engine: CacheEngine, store: ServerStore | None) -> Slices[bool]:
    complete = yield from engine.manager.check_integrity_in_slices()
    yield from engine.schedulers.check_in_slices()
    if store is not None:
        yield from store.blocks.check_in_slices()
    return complete
