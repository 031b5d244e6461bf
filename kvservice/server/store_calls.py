"""The handlers of StoreService: blocks of K/V by key."""

from __future__ import annotations

from typing import NoReturn

from google.protobuf.message import Message

from kvservice.errors import StoreOffError
from kvservice.server.handlers import Handler, SessionHandler, WhileDraining
from kvservice.server.sessions import ServerSession
from kvservice.v1 import store_pb2


class StoreCalls:
    def handlers(self) -> tuple[Handler, ...]:
        refused = WhileDraining.REFUSED
        return (
            SessionHandler("store_open_namespace", store_pb2.OpenNamespaceRequest, self.off, refused),
            SessionHandler("store_lookup", store_pb2.LookupRequest, self.off),
            SessionHandler("store_acquire", store_pb2.AcquireRequest, self.off),
            SessionHandler("store_renew", store_pb2.RenewRequest, self.off),
            SessionHandler("store_release", store_pb2.ReleaseRequest, self.off),
            SessionHandler("store_reserve", store_pb2.ReserveRequest, self.off, refused),
            SessionHandler("store_commit", store_pb2.StoreCommitRequest, self.off),
            SessionHandler("store_abort", store_pb2.AbortRequest, self.off),
            SessionHandler("store_batch_get", store_pb2.BatchGetRequest, self.off),
            SessionHandler("store_batch_put", store_pb2.BatchPutRequest, self.off, refused),
            SessionHandler("store_touch", store_pb2.TouchRequest, self.off),
            SessionHandler("store_remove", store_pb2.RemoveRequest, self.off),
            SessionHandler("store_clear", store_pb2.ClearRequest, self.off),
            SessionHandler("store_map_store", store_pb2.MapStoreRequest, self.off, refused),
        )

    def off(self, _: ServerSession, __: Message) -> NoReturn:
        raise StoreOffError("the daemon has no store")
