"""The daemon's configuration, one frozen model. Command line options, environment variables and file keys follow it."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from kvservice.pool.layout import PoolLayout

ENV_PREFIX = "KVSERVICE_"
GIB = 1 << 30
# A disk tier has a few slabs at least.
MIN_DISK_GIB = 0.25
# vLLM's names for cache dtypes that differ from the model's dtype.
CACHE_DTYPES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


@dataclass(frozen=True)
class RequestLimits:
    """Limits on one request. The fields of ServeConfig with the same names describe them."""

    max_request_sequences: int
    max_request_tokens: int
    max_request_blocks: int


def default_unix_socket() -> str:
    """Return /run/kvservice.sock for root, else a path in the user's runtime directory, or in `home_folder`: where
    everybody may write, another user could be there first. Empty if the user has no home directory."""
    if os.geteuid() == 0 and Path("/run").is_dir():
        return "/run/kvservice.sock"
    folder = os.environ.get("XDG_RUNTIME_DIR") or home_folder()
    return folder and f"{folder}/kvservice.sock"


def home_folder() -> str:
    """Return the folder in the user's home directory, which `serve` makes. Empty if there is no home directory."""
    folder = os.path.expanduser("~/.kvservice")
    return "" if folder.startswith("~") else folder


# Options that do nothing unless another one is set.
_NEEDED = {
    "disk_admission": "disk_gib",
    "disk_threads": "disk_gib",
    "disk_sessions_gib": "disk",
    "event_token_ids": "event_window",
    "max_transfers": "transfer_address",
    "mooncake_address": "mooncake",
    "mooncake_device": "mooncake",
    "mooncake_metadata": "mooncake",
    "mooncake_protocol": "mooncake",
    "otel_sample_ratio": "otel_endpoint",
    "transfer_insecure": "transfer_address",
    "transfer_protocol": "transfer_address",
}


class ServeConfig(BaseModel):
    """Options of `kvservice serve`. The field descriptions are their help texts."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    device: str = Field(
        "cpu",
        pattern="^(cpu|cuda(:[0-9]{1,3})?)$",
        examples=["cpu", "cuda", "cuda:1"],
        description="Device of the pool: cpu, cuda (the first GPU) or cuda:N.",
    )
    model: str = Field(
        "",
        description="Directory of a Hugging Face model, or its config.json. It determines the layers, KV heads, "
        "head size and dtype that are not set otherwise.",
    )
    num_layers: int = Field(32, ge=1, le=4096, description="Layers of the model.")
    num_kv_heads: int = Field(8, ge=1, le=4096, description="KV heads of a layer.")
    head_size: int = Field(128, ge=32, le=256, multiple_of=8, description="Size of a head.")
    dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "bfloat16", description="Data type of keys, values, queries and outputs."
    )
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="Data type in which the pool stores K/V. auto: dtype; fp8: fp8_e4m3. The CPU supports auto only.",
    )
    kv_scales: str = Field(
        "",
        description="JSON file with the scales of an 8-bit cache, k_scale and v_scale: each a number, one for each "
        "layer, or one for each KV head of each layer. Empty: 1.",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens in a block, a power of two.")
    num_blocks: int | None = Field(
        None, ge=1, le=1 << 24, description="Blocks of the pool. Unset: as many as fit into its size."
    )
    pool_gib: float = Field(
        1.0,
        gt=0,
        le=1 << 16,
        description="Size of the pool in GiB, if num_blocks is unset. On a GPU the default is unused: "
        "gpu_memory_utilization applies unless this is set.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the GPU's memory for the pool, of what is free after the daemon's workspaces, if "
        "neither num_blocks nor pool_gib is set.",
    )
    swap_space_gib: float = Field(0.25, ge=0, le=1 << 16, description="Size of the swap tier in GiB.")
    watermark: float = Field(0.01, ge=0, lt=1, description="Share of the pool that new sequences must leave free.")
    enable_prefix_caching: bool = Field(True, description="Keep the computed blocks of freed sequences and share them.")
    max_pinned_fraction: float = Field(0.5, ge=0, le=1, description="Largest share of the pool that clients may pin.")
    max_sequences: int = Field(
        1024, ge=1, le=1 << 20, description="Most sequences at one time, over all sessions, those on the disk included."
    )
    max_sequence_tokens: int = Field(131072, ge=1, le=1 << 24, description="Longest sequence, in tokens.")
    max_queued_requests: int = Field(
        65536, ge=1, le=1 << 24, description="Most unfinished requests of the schedulers of all sessions."
    )
    max_queued_tokens: int = Field(
        1 << 25,
        ge=1,
        le=1 << 40,
        description="Most tokens in the prompts of unfinished requests, over the schedulers of all sessions.",
    )
    max_request_sequences: int = Field(
        1024, ge=1, le=1 << 16, description="Most sequences, or ranges of them, that one request may name."
    )
    max_request_tokens: int | None = Field(
        None,
        ge=1,
        le=1 << 24,
        description="Most tokens in one request, in the step that it opens, or in its response. Unset: 131072, or "
        "max_sequence_tokens if that is more.",
    )
    max_request_blocks: int | None = Field(
        None,
        ge=1,
        le=1 << 24,
        description="Most blocks that one request may swap, write to, fork, truncate or describe, and most keys of the "
        "block store in it. Unset: 32768, or the blocks of the longest sequence if they are more.",
    )
    num_threads: int = Field(0, ge=0, le=1024, description="Threads of the CPU kernels. 0: one for each core.")
    batch_invariant: bool = Field(
        False,
        description="Make a sequence's output independent, bit for bit, of what else is in the batch. Costs time, and "
        "tensors larger than max_message_mib are refused instead of sent in parts.",
    )

    unix_socket: str = Field(
        default_factory=default_unix_socket, description="Path of the unix socket. Empty: none is opened."
    )
    unix_socket_mode: str = Field(
        "0600",
        pattern="^0?[0-7]{3}$",
        examples=["0600", "0666"],
        description="File mode of the unix socket, in octal: who may connect.",
    )
    tcp_address: str = Field("127.0.0.1:50051", description="host:port for gRPC over TCP. Empty: none is opened.")
    tls_cert: str = Field(
        "",
        description="PEM file with the daemon's certificate and its chain, for gRPC over TCP and for HTTP. Reloaded "
        "when it changes. Empty: neither is encrypted.",
    )
    tls_key: str = Field("", description="PEM file with the key of tls_cert.")
    tls_client_ca: str = Field(
        "",
        description="PEM file with the CA of client certificates. gRPC clients over TCP must present one. Empty: "
        "they need none.",
    )
    auth_tokens: str = Field(
        "",
        description="File with names and hashes of tokens, made by `kvservice token`. gRPC clients over TCP must "
        "present a token. Reloaded when it changes. Empty: they need none.",
    )
    tenants: str = Field(
        "",
        description="TOML file with the tenants: whose tokens, certificates and sockets are whose, their roles, and "
        "what they share. Reloaded when it changes. Empty: there is one tenant, and whoever may connect may do "
        "everything.",
    )
    insecure: bool = Field(
        False, description="Let other hosts use gRPC over TCP even without TLS, or without tokens and client CA."
    )
    transfer_address: str = Field(
        "",
        description="IPv4 address from which this host reaches its clients. Blocks of clients over TCP, and K/V that "
        "they write and read, then travel by Mooncake's Transfer Engine: the daemon connects to an engine of the "
        "client. Empty: they travel in messages.",
    )
    transfer_protocol: Literal["tcp", "rdma"] = Field(
        "tcp", description="Network of the Transfer Engine, the same for the daemon and its clients."
    )
    transfer_insecure: bool = Field(
        False,
        description="Let transfer_address be off the loopback interface. The engine has no TLS and no tokens: whoever "
        "reads the network reads the blocks.",
    )
    max_transfers: int = Field(
        16, ge=1, le=1024, description="Most remote regions at one time. Each is a process of 40 MB besides its memory."
    )
    http_address: str = Field(
        "127.0.0.1:9464", description="host:port of the metrics and of the live page. Empty: none is opened."
    )
    http_token: str = Field(
        "",
        repr=False,
        description="Token that a browser presents for the page, 16 to 256 characters. Off the loopback "
        "interface there is no page without it. Do not set it on the command line, where others can read it.",
    )
    metrics_token: str = Field(
        "",
        repr=False,
        description="Bearer token that a scraper presents for /metrics, 16 to 256 characters. Empty: it needs none. Do "
        "not set it on the command line, where others can read it.",
    )
    event_window: int = Field(
        50_000,
        ge=0,
        le=1 << 24,
        description="Number of latest blocks whose events are kept for replay. 0: there are no events.",
    )
    event_token_ids: bool = Field(False, description="Include token ids in block events.")
    max_event_streams: int = Field(16, ge=1, le=1024, description="Most subscribers to block events at one time.")
    max_labels: int = Field(
        32,
        ge=1,
        le=1000,
        description="Most tenants, and most session names, that metrics list separately. The others are summed up "
        "under one label.",
    )
    otel_endpoint: str = Field(
        "", description="URL of an OpenTelemetry collector for traces of calls (OTLP over gRPC). Empty: none are sent."
    )
    otel_sample_ratio: float = Field(
        0.01, ge=0, le=1, description="Share of calls to trace where the caller has not decided it."
    )

    session_grace_s: float = Field(5.0, ge=0.1, le=3600, description="Seconds that a session outlives its stream.")
    client_timeout_s: float = Field(
        15.0,
        ge=3,
        le=3600,
        description="A client that is frozen, or whose host is gone, loses its connection after this many seconds. Its "
        "sessions then have session_grace_s. A client that is killed loses it at once.",
    )
    max_detach_ttl_s: float = Field(
        3600.0, ge=0, le=30 * 86400, description="Longest time in seconds that a detached session waits for a client."
    )
    max_sessions: int = Field(256, ge=1, le=65536, description="Most sessions at one time.")
    max_connections: int | None = Field(
        None,
        ge=1,
        le=1 << 18,
        description="Most gRPC connections at one time, on each address. Unset: 512, or twice max_sessions if that "
        "is more.",
    )
    max_connections_per_peer: int | None = Field(
        None,
        ge=1,
        le=1 << 18,
        description="Most gRPC connections at one time of one peer: an IP address, or on a unix socket that others can "
        "connect to a user other than root and the daemon's own. Unset: half of max_connections, at least one.",
    )
    first_call_s: float = Field(
        30.0,
        ge=1,
        le=3600,
        description="A connection over TCP on which no call was accepted within this many seconds is closed.",
    )
    allow_client_shm: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Who may have lanes and shared-memory regions over the unix socket. auto: the daemon's own user "
        "and root; on: also trusted_uids; off: nobody.",
    )
    max_regions: int = Field(16, ge=1, le=1024, description="Most shared-memory regions of a session at one time.")
    max_region_mib: int = Field(
        256,
        ge=1,
        le=1 << 20,
        description="Most memory in MiB that the daemon allocates for the regions of one session.",
    )
    max_shared_mib: int = Field(
        1024,
        ge=0,
        le=1 << 24,
        description="Most host memory in MiB for regions, lanes and tables of mapped pools, over all sessions.",
    )
    max_lanes: int = Field(64, ge=0, le=1024, description="Most lanes at one time. Each is a thread of the daemon.")
    max_pool_mappings: int = Field(
        64,
        ge=0,
        le=1024,
        description="Most sessions that have mapped the pool at one time. Each takes 16 MiB of tables.",
    )
    lane_spin_us: float = Field(
        50.0, ge=0, le=1e6, description="Microseconds for which a lane spins for the next call before it sleeps."
    )
    share_pool: Literal["off", "read", "write"] = Field(
        "off",
        description="Whether clients on the unix socket may map the pool: read lets them read all of it, write also "
        "write.",
    )
    store_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 16,
        description="Size in GiB of the block store, host memory for blocks of engines that have a pool of their own. "
        "At least 1/64; 0: there is none.",
    )
    share_store: Literal["off", "read", "auto", "write"] = Field(
        "auto",
        description="Whether clients on the unix socket may map the block store: read lets them read all of it, write "
        "also write. auto: the daemon's own user and root write, others read.",
    )
    max_store_namespaces: int = Field(
        64, ge=1, le=4096, description="Most namespaces of the block store: models with their layouts, and tenants."
    )
    store_quota_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 16,
        description="Most GiB of values of one namespace of the block store, a block at least. 0: all of it.",
    )
    max_lease_s: float = Field(
        60.0, gt=0, le=3600, description="Longest time in seconds of a lease on blocks of the store."
    )
    disk: str = Field(
        "",
        description="Directory for what outlives the daemon and the machine's memory, on a disk of this host. One "
        "daemon uses it. Empty: there is none.",
    )
    disk_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 20,
        description="Size in GiB of the disk tier, files in disk for values of the block store that its memory has no "
        "room for. At least 1/4; 0: there is none. Its files are made of slabs of 66 MiB with 64 MiB for values, as "
        "many as fit: 0.25 has room for 0.19 GiB.",
    )
    disk_threads: int = Field(
        16, ge=1, le=256, description="Threads that read and write the disk: so many transfers are in progress at most."
    )
    disk_admission: Literal["all", "reused"] = Field(
        "all",
        description="Which values that leave the memory of the block store are written to the disk. reused: those that "
        "were used again after they were stored, or were stored before.",
    )
    disk_sessions_gib: float = Field(
        16.0,
        ge=0,
        le=1 << 20,
        description="Most GiB of saved sessions in disk, besides what else is there. 0: sessions are not saved.",
    )
    store_copy_threads: int = Field(
        2, ge=1, le=256, description="Threads that copy between the block store and requests or regions."
    )
    mooncake: str = Field(
        "",
        description="host:port of the master of a Mooncake Store, which keeps values of the block store for all "
        "daemons that use it. Needs kvservice[mooncake]. Empty: none.",
    )
    mooncake_address: str = Field(
        "127.0.0.1",
        min_length=1,
        description="Address of this host in the Mooncake Store. With mooncake_segment_gib its ports are open there, "
        "otherwise none is open.",
    )
    mooncake_segment_gib: float = Field(
        0.0,
        ge=0,
        le=1 << 16,
        description="Memory in GiB that the daemon gives to the Mooncake Store, besides its own. Values in it are lost "
        "when the daemon ends. Whoever reaches mooncake_address can read and write it.",
    )
    mooncake_metadata: str = Field(
        "P2PHANDSHAKE",
        min_length=1,
        description="URL of the metadata server of the Mooncake Store. P2PHANDSHAKE: it has none.",
    )
    mooncake_protocol: Literal["tcp", "rdma"] = Field("tcp", description="How Mooncake moves values.")
    mooncake_device: str = Field("", description="RDMA devices for Mooncake, separated by commas. Empty: all.")
    spill: bool = Field(
        True,
        description="Save computed blocks of the pool in the block store, if there is one, and load them from there.",
    )
    weights: str = Field(
        "",
        max_length=256,
        description="Name of the model's weights, for blocks of the pool in tiers that outlive the daemon: daemons "
        "with the same name share them. Empty: the revision, if model is in a snapshot directory of Hugging Face; "
        "otherwise these blocks stay in memory.",
    )
    prefill_tokens_per_s: float = Field(
        0.0,
        ge=0,
        le=1e9,
        description="Tokens of prompts that the engine computes in a second. Blocks are loaded only if that is faster. "
        "0: as measured for engines that use the scheduler, or an estimate.",
    )
    trusted_uids: str = Field(
        "",
        pattern=r"^(\d+(,\d+)*)?$",
        examples=["1000", "1000,1001"],
        description="Numbers of the users, separated by commas, that are trusted besides the daemon's own user and "
        "root: with the pool as share_pool says, with the block store as share_store says, with lanes and regions if "
        "allow_client_shm is on.",
    )
    max_message_mib: int = Field(
        8,
        ge=1,
        le=1024,
        description="Largest gRPC message in MiB, both ways. Larger tensors travel in parts; with batch_invariant they "
        "are refused.",
    )
    drain_timeout_s: float = Field(30.0, ge=0, le=3600, description="Seconds that running steps have after SIGTERM.")
    drain_stall_s: float = Field(
        5.0, ge=0, le=3600, description="Seconds without another layer after which SIGTERM no longer waits for a step."
    )
    integrity_interval_s: float = Field(
        60.0,
        ge=0,
        le=86400,
        description="Seconds between checks of all block tables, which run while no call is in progress. 0: never.",
    )
    keeper: bool = Field(
        True,
        description="Run under a small parent process that keeps the pool and the bookkeeping, and starts the daemon "
        "again with them after a crash. Without effect under systemd, which does the same.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Lowest level that is logged.")
    log_format: Literal["text", "json"] = Field(
        "text", description="Format of the log on stderr. json: one object per line."
    )

    @field_validator("*", mode="before")
    @classmethod
    def _of_its_kind(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse an empty text for what is no text, and true and false, which pydantic takes for numbers."""
        kind = cls.model_fields[info.field_name or ""].annotation
        if value == "" and kind is not str:
            raise ValueError("is empty")
        if isinstance(value, bool) and kind is not bool:
            raise ValueError(f"must not be {str(value).lower()}")
        return value

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value

    @field_validator("device")
    @classmethod
    def _numbered(cls, value: str) -> str:
        return "cuda:0" if value == "cuda" else value

    @field_validator("http_token", "metrics_token")
    @classmethod
    def _token(cls, value: str) -> str:
        if not re.fullmatch(r"([\x21-\x7e]{16,256})?", value):
            raise ValueError("must be 16 to 256 printable characters of ASCII without spaces, or empty")
        return value

    @field_validator("tcp_address", "http_address", "mooncake")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        if value:
            host, _, port = value.rpartition(":")
            if not host or not port.isdigit() or int(port) > 65535:
                raise ValueError("must be host:port, or empty")
        return value

    @field_validator("transfer_address")
    @classmethod
    def _numeric(cls, value: str) -> str:
        if value:
            try:
                known = not ipaddress.IPv4Address(value).is_unspecified
            except ValueError:
                known = False
            if not known:
                raise ValueError("must be the IPv4 address of an interface, or empty")
        return value

    @model_validator(mode="after")
    def _eight_bits(self) -> ServeConfig:
        if self.kv_cache_dtype == "auto":
            if self.kv_scales:
                raise ValueError("kv_scales: only an FP8 cache has scales, but kv_cache_dtype is auto")
        elif self.head_size % 16:
            raise ValueError(f"kv_cache_dtype: FP8 needs a head_size that is a multiple of 16, not {self.head_size}")
        return self

    @field_validator("weights")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not value.isprintable():
            raise ValueError("must be printable")
        return value

    @field_validator("store_gib")
    @classmethod
    def _some_slabs(cls, value: float) -> float:
        if 0 < value < 1 / 64:
            raise ValueError("must be at least 1/64, or 0")
        return value

    @model_validator(mode="after")
    def _quota_of_the_store(self) -> ServeConfig:
        if self.store_gib and self.store_quota_gib > self.store_gib:
            raise ValueError(f"store_quota_gib: {self.store_quota_gib:g} is more than store_gib, {self.store_gib:g}")
        return self

    @model_validator(mode="after")
    def _tiers_of_a_store(self) -> ServeConfig:
        if self.mooncake and not self.store_gib:
            raise ValueError("mooncake: it keeps values of the block store: set store_gib")
        if self.mooncake_segment_gib and not self.mooncake:
            raise ValueError("mooncake_segment_gib: there is no Mooncake Store: set mooncake")
        if self.disk_gib and not (self.disk and self.store_gib):
            missing = "store_gib" if self.disk else "disk"
            raise ValueError(f"disk_gib: a disk tier keeps values of the block store in files: set {missing}")
        if 0 < self.disk_gib < MIN_DISK_GIB:
            raise ValueError(f"disk_gib: must be at least {MIN_DISK_GIB:g}, or 0, not {self.disk_gib:g}")
        return self

    @model_validator(mode="after")
    def _with_effect(self) -> ServeConfig:
        """Refuse what was set and would do nothing."""
        if "gpu_memory_utilization" in self.model_fields_set:
            if self.cuda_device is None:
                raise ValueError(f"gpu_memory_utilization: the pool is on the device {self.device}, which is no GPU")
            if self.pool_blocks is not None:
                raise ValueError(
                    f"gpu_memory_utilization: {self.pool_field} says how large the pool is: set one of them"
                )
        for name, needed in _NEEDED.items():
            value = getattr(self, name)
            if value and value != type(self).model_fields[name].default and not getattr(self, needed):
                raise ValueError(f"{name}: has no effect without {needed}: set that as well")
        return self

    @model_validator(mode="after")
    def _certificate_and_key(self) -> ServeConfig:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError(f"{'tls_key' if self.tls_cert else 'tls_cert'}: a certificate and its key go together")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("tls_client_ca: certificates of clients can be asked for only over TLS: set tls_cert")
        return self

    @property
    def request_limits(self) -> RequestLimits:
        longest = -(-self.max_sequence_tokens // self.block_size)
        return RequestLimits(
            self.max_request_sequences,
            self.max_request_tokens or max(131072, self.max_sequence_tokens),
            self.max_request_blocks or max(32768, longest),
        )

    @property
    def connection_limit(self) -> int:
        return self.max_connections or max(512, 2 * self.max_sessions)

    @property
    def peer_connection_limit(self) -> int:
        return self.max_connections_per_peer or max(1, self.connection_limit // 2)

    @property
    def cuda_device(self) -> int | None:
        """Index of the GPU, or None if the pool is in host memory."""
        kind, _, number = self.device.partition(":")
        return int(number or 0) if kind == "cuda" else None

    @property
    def layout(self) -> PoolLayout:
        stored = CACHE_DTYPES.get(self.kv_cache_dtype, self.dtype)
        return PoolLayout(self.num_layers, self.num_kv_heads, self.head_size, self.block_size, stored)

    @property
    def pool_blocks(self) -> int | None:
        """Blocks of the pool, or None for as many as the device has memory for."""
        if self.num_blocks is not None:
            return self.num_blocks
        if self.cuda_device is not None and "pool_gib" not in self.model_fields_set:
            return None
        return int(self.pool_gib * GIB) // self.layout.block_bytes

    @property
    def pool_field(self) -> str:
        """The option that sets pool_blocks, if one does."""
        return "pool_gib" if self.num_blocks is None else "num_blocks"

    @property
    def swap_blocks(self) -> int:
        return int(self.swap_space_gib * GIB) // self.layout.block_bytes

    @property
    def fd_socket(self) -> str:
        """Path of the socket for fd passing to clients on this host, or empty if there is none."""
        wanted = self.unix_socket and (
            self.allow_client_shm != "off" or self.share_pool != "off" or self.shares_store != "off"
        )
        return f"{self.unix_socket}.fds" if wanted else ""

    @property
    def shares_memory(self) -> bool:
        """Whether clients may have lanes and regions at all."""
        return bool(self.unix_socket) and self.allow_client_shm != "off"

    @property
    def shares_store(self) -> Literal["off", "read", "auto", "write"]:
        """Whether clients may map the block store: `share_store`, if there is a store."""
        return self.share_store if self.unix_socket and self.store_gib else "off"

    @property
    def unix_socket_is_private(self) -> bool:
        """Whether only the daemon's user and root can connect to the unix socket. Connecting needs write permission."""
        return int(self.unix_socket_mode, 8) & 0o022 == 0

    @property
    def trusted_uid_set(self) -> frozenset[int]:
        return frozenset(int(uid) for uid in self.trusted_uids.split(",") if uid)

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_mib << 20
