"""Snapshots between nodes, over Arrow Flight: one table of one byte column, in chunks, straight from and into slots.

Two calls, both with the job's token in a header: `push` puts a snapshot into one of the peer's replica slots, `pull` gets
one out of any slot. Whoever receives verifies every checksum before the snapshot counts. A slot is unsealed before the
first byte is written to it and its head is written last, so a broken transfer leaves a slot that holds nothing.

This is the transport for now (design: Checkpoint); everything else goes through `push`, `pull` and `SnapshotShelf`.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import pyarrow as pa
from pyarrow import flight

from surefoot.agent import slots
from surefoot.agent.decide import HeldImage, SlotView, slot_to_overwrite
from surefoot.agent.errors import MemoryBudgetError, SharedMemoryFullError, TransferError
from surefoot.agent.messages import Image, PeerAddress, TransferFailure
from surefoot.agent.slots import REPLICA_SLOTS, UNSEALED_BYTES, SlotFolder
from surefoot.ckpt import tiers

log = logging.getLogger(__name__)

CHUNK_BYTES: Final = 4 << 20
"""One record batch. Larger chunks gain nothing on loopback and hold the interpreter's lock for longer."""

_SCHEMA = pa.schema([("bytes", pa.uint8())])
_TOKEN_HEADER = "x-surefoot-token"


class SnapshotName(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot on the wire. `nbytes` of its image; a pull does not know it beforehand."""

    rank: int
    generation: int
    step: int
    nbytes: int = 0
    in_force: int = 0
    """A push: the generation that the sender follows. The snapshot may be older: its starting point is."""
    start_generation: int = 0
    start_step: int = 0
    """A push: the starting point of that generation, which the receiver may not know yet."""

    def __str__(self) -> str:
        return f"the snapshot of rank {self.rank} at generation {self.generation}, step {self.step}"


class SnapshotShelf:
    """The slots of this node as peers see them. Safe to use from several threads.

    Args:
        on_change: called with all replicas held, from whichever thread changed them; one call at a time, and the last one
            tells what is held.
    """

    def __init__(self, folder: SlotFolder, on_change: Callable[[list[HeldImage]], None]) -> None:
        self._folder = folder
        self._on_change = on_change
        self._rank_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
        self._telling = threading.Lock()
        self._generation = 0
        # Heads are read once: only this process writes replicas, and an image's meta data can be megabytes.
        self._replicas = {
            image.path: image for rank in folder.ranks("replica") for image in folder.images("replica", rank)
        }

    def set_generation(self, generation: int) -> None:
        """What comes from older generations is refused from now on."""
        self._generation = max(self._generation, generation)

    def find(self, name: SnapshotName) -> HeldImage | None:
        held = [*self._folder.images("own", name.rank), *self.replicas()]
        wanted = (name.rank, name.generation, name.step)
        return next((h for h in held if (h.rank, *h.point) == wanted), None)

    def replicas(self) -> list[HeldImage]:
        return list(self._replicas.values())

    def drop_ranks(self, ranks: Collection[int]) -> None:
        """Remove the replica slots of these ranks."""
        for rank in ranks:
            with self._rank_locks[rank]:
                for path in [p for p, h in self._replicas.items() if h.rank == rank]:
                    del self._replicas[path]
                self._folder.drop_ranks("replica", [rank])
        if ranks:
            self._tell()

    def store(self, name: SnapshotName, chunks: Iterable[memoryview]) -> None:
        """Put a peer's snapshot into a replica slot, verified.

        Raises:
            TransferError: refused, damaged on its way, or no room.
        """
        if name.in_force < self._generation:
            raise TransferError(
                "refused", f"{name} comes from generation {name.in_force}, and {self._generation} is in force"
            )
        with self._rank_locks[name.rank]:
            if self.has_replica(name):
                # It was verified when it came. Writing it anew would take it away for a while, and it may be needed.
                for _ in chunks:
                    pass
                return
            path = self._slot_for(name)
            try:
                self._folder.reserve(path, name.nbytes)
            except (MemoryBudgetError, SharedMemoryFullError) as e:
                raise TransferError("memory", str(e)) from e
            self._replicas.pop(str(path), None)
            receive(path, name, chunks)
            self._replicas[str(path)] = HeldImage(
                rank=name.rank, generation=name.generation, step=name.step, replica=True, path=str(path)
            )
        self._tell()

    def _tell(self) -> None:
        """Two ranks' copies may arrive at once: a list that is older must not be told after a newer one, or the copy that it
        lacks stays unknown until the next one comes."""
        with self._telling:
            self._on_change(self.replicas())

    def has_replica(self, name: SnapshotName) -> bool:
        wanted = (name.rank, name.generation, name.step)
        return any((h.rank, *h.point) == wanted for h in self._replicas.values())

    def _slot_for(self, name: SnapshotName) -> Path:
        paths = [str(self._folder.path("replica", name.rank, k)) for k in range(REPLICA_SLOTS)]
        held = [self._replicas.get(p) for p in paths]
        index = slot_to_overwrite(
            [SlotView(index=k, point=h.point if h else None) for k, h in enumerate(held)],
            generation=name.in_force,
            start=(name.start_generation, name.start_step),
            incoming=(name.generation, name.step),
        )
        if index is None:
            raise TransferError("refused", f"all replica slots of rank {name.rank} are still needed")
        return self._folder.path("replica", name.rank, index)


def receive(path: Path, name: SnapshotName, chunks: Iterable[memoryview]) -> None:
    """Write an image into a slot file that has room for it: head last, then verify.

    Raises:
        TransferError: it is not whole, or not what its name says; the slot then holds nothing.
    """
    slots.unseal(path)
    with slots.mapped(path, write=True) as view:
        head, written = _write_tail(view, name, chunks)
        if written != name.nbytes:
            raise TransferError(
                "snapshot_corrupt", f"{name} has {name.nbytes:,} bytes, {written:,} of them came"
            )
        view[: len(head)] = head
        problem = _problem(view[: name.nbytes], name)
    if problem is not None:
        slots.unseal(path)
        raise TransferError("snapshot_corrupt", f"{name} did not arrive whole: {problem}")


def _write_tail(view: memoryview, name: SnapshotName, chunks: Iterable[memoryview]) -> tuple[bytearray, int]:
    """Write all but the head, which is what makes it an image; returns the head and the number of bytes that came."""
    head = bytearray()
    at = 0
    for chunk in chunks:
        if at + len(chunk) > name.nbytes:
            raise TransferError("snapshot_corrupt", f"more than the {name.nbytes:,} bytes of {name} came")
        kept = max(0, min(UNSEALED_BYTES - at, len(chunk)))
        head += chunk[:kept]
        view[at + kept : at + len(chunk)] = chunk[kept:]
        at += len(chunk)
    return head, at


def _problem(image: memoryview, name: SnapshotName) -> str | None:
    try:
        info = tiers.verify_image(image)
    except tiers.ImageError as e:
        return str(e)
    found = (info.rank, info.generation, info.step)
    if found != (name.rank, name.generation, name.step):
        return f"it is of rank {found[0]}, generation {found[1]}, step {found[2]}"
    return None


# ---------------------------------------------------------------- bytes <-> record batches


def _batches(image: memoryview) -> Iterator[pa.RecordBatch]:
    """Zero-copy slices of mapped memory."""
    whole = pa.py_buffer(image)
    for at in range(0, len(image), CHUNK_BYTES):
        piece = whole.slice(at, min(CHUNK_BYTES, len(image) - at))
        yield pa.record_batch([pa.Array.from_buffers(pa.uint8(), piece.size, [None, piece])], schema=_SCHEMA)


def _chunks(reader: Any) -> Iterator[memoryview]:
    """The bytes of the batches that a Flight stream reader gives."""
    for chunk in reader:
        column = chunk.data.column(0)
        data = column.buffers()[1]
        if data is not None and len(column):
            yield memoryview(data).cast("B")[column.offset : column.offset + len(column)]


# ---------------------------------------------------------------- the server


class _TokenCheck(flight.ServerMiddlewareFactory):
    """Every call must carry the job's token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token

    def start_call(self, info: Any, headers: Mapping[str, list[str]]) -> None:
        given = next(iter(headers.get(_TOKEN_HEADER, [])), "")
        if not hmac.compare_digest(given.encode(), self._token.encode()):
            raise flight.FlightUnauthenticatedError("refused: this is another job's token")


class SnapshotFlightServer(flight.FlightServerBase):
    """Listens on `host`, on a port of its own choosing, from construction on."""

    def __init__(self, host: str, token: str, shelf: SnapshotShelf) -> None:
        super().__init__(f"grpc://{_bracketed(host)}:0", middleware={"token": _TokenCheck(token)})
        self._shelf = shelf

    def do_put(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:
        with _errors_told():
            name = msgspec.json.decode(descriptor.command, type=SnapshotName)
            self._shelf.store(name, _chunks(reader))

    def do_action(self, context: Any, action: Any) -> Any:
        """``has``: whether a replica is here, so that it need not be sent."""
        if action.type != "has":
            raise NotImplementedError(f"no action {action.type!r}")  # Flight answers with its "unimplemented"
        name = msgspec.json.decode(action.body.to_pybytes(), type=SnapshotName)
        return iter([flight.Result(b"yes" if self._shelf.has_replica(name) else b"no")])

    def do_get(self, context: Any, ticket: Any) -> Any:
        with _errors_told():
            name = msgspec.json.decode(ticket.ticket, type=SnapshotName)
            image = self._shelf.find(name)
            if image is None:
                raise TransferError("snapshot_missing", f"{name} is not here")
            with slots.mapped(Path(image.path)) as view:
                nbytes = tiers.read_image(view).nbytes
                schema = _SCHEMA.with_metadata({"nbytes": str(nbytes)})
                return flight.GeneratorStream(schema, _batches(view[:nbytes]))


@contextmanager
def _errors_told() -> Iterator[None]:
    """Turns what went wrong into an error whose text the other end can read back into a `TransferError`."""
    try:
        yield
    except TransferError as e:
        raise flight.FlightServerError(f"{e.kind}: {e}") from e
    except (tiers.ImageError, OSError, ValueError) as e:
        raise flight.FlightServerError(f"snapshot_missing: {e}") from e


# ---------------------------------------------------------------- the client


class SnapshotClient:
    """Pushes to and pulls from peers; keeps one connection per peer. Safe to use from several threads."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._clients: dict[tuple[str, int], flight.FlightClient] = {}
        self._lock = threading.Lock()

    def push(
        self,
        peer: PeerAddress,
        image: Image,
        *,
        in_force: int,
        start: tuple[int, int],
        deadline_s: float,
    ) -> int:
        """Put one of our snapshots into a replica slot of `peer`; it is verified there when this returns.

        Args:
            in_force: the generation that this node follows, and `start` its starting point.

        Returns:
            The bytes sent; 0 where the peer had it already.

        Raises:
            TransferError
        """
        with slots.mapped(Path(image.path)) as view:
            nbytes = _expect(view, image)
            name = SnapshotName(
                rank=image.rank,
                generation=image.generation,
                step=image.step,
                nbytes=nbytes,
                in_force=in_force,
                start_generation=start[0],
                start_step=start[1],
            )
            with self._told(peer):
                client = self._client(peer)
                if (image.generation, image.step) == start and self._has(client, name, deadline_s):
                    return 0
                command = flight.FlightDescriptor.for_command(msgspec.json.encode(name))
                writer, answers = client.do_put(command, _SCHEMA, self._options(deadline_s))
                with writer:  # leaving it waits for the server's verdict
                    for batch in _batches(view[:nbytes]):
                        writer.write_batch(batch)
                    writer.done_writing()
                    answers.read()
        return nbytes

    def _has(self, client: flight.FlightClient, name: SnapshotName, deadline_s: float) -> bool:
        action = flight.Action("has", msgspec.json.encode(name))
        answers = list(client.do_action(action, self._options(deadline_s)))
        return bool(answers) and answers[0].body.to_pybytes() == b"yes"

    def pull(
        self,
        peer: PeerAddress,
        image: Image,
        folder: SlotFolder,
        *,
        wanted: Callable[[], bool],
        deadline_s: float,
    ) -> int:
        """Get a snapshot from `peer` into the slot file `image.path` (made or grown as needed), verified.

        Args:
            wanted: looked at before each chunk; once it is false nothing more is written.

        Returns:
            The bytes received.

        Raises:
            TransferError, MemoryBudgetError, SharedMemoryFullError
        """
        name = SnapshotName(rank=image.rank, generation=image.generation, step=image.step)
        with self._told(peer):
            ticket = flight.Ticket(msgspec.json.encode(name))
            reader = self._client(peer).do_get(ticket, self._options(deadline_s))
            metadata = reader.schema.metadata or {}
            name = msgspec.structs.replace(name, nbytes=int(metadata.get(b"nbytes", b"0")))
            path = Path(image.path)
            folder.reserve(path, name.nbytes)
            receive(path, name, _while_wanted(_chunks(reader), wanted, name))
        return name.nbytes

    def close(self) -> None:
        with self._lock:
            for client in self._clients.values():
                client.close()
            self._clients.clear()

    def _client(self, peer: PeerAddress) -> flight.FlightClient:
        with self._lock:
            address = (peer.host, peer.port)
            if address not in self._clients:
                self._clients[address] = flight.connect(f"grpc://{_bracketed(peer.host)}:{peer.port}")
            return self._clients[address]

    def _forget(self, peer: PeerAddress) -> None:
        """A connection that failed is not kept: the next try may find the peer at rights again, or elsewhere."""
        with self._lock:
            client = self._clients.pop((peer.host, peer.port), None)
        if client is not None:
            client.close()

    def _options(self, deadline_s: float) -> flight.FlightCallOptions:
        return flight.FlightCallOptions(
            timeout=deadline_s, headers=[(_TOKEN_HEADER.encode(), self._token.encode())]
        )

    @contextmanager
    def _told(self, peer: PeerAddress) -> Iterator[None]:
        """Turns Flight's errors into `TransferError`."""
        where = f"{peer.uid} ({peer.host}:{peer.port})"
        try:
            yield
        except flight.FlightUnauthenticatedError as e:
            raise TransferError("refused", f"{where} refuses our token") from e
        except flight.FlightServerError as e:
            told, _, detail = str(e).partition(": ")
            kind: TransferFailure = told if told in get_args(TransferFailure) else "peer_unreachable"  # pyright: ignore[reportAssignmentType]  (just looked up)
            raise TransferError(kind, f"{where}: {_first_line(detail or told)}") from e
        except (flight.FlightError, pa.ArrowException) as e:
            self._forget(peer)
            raise TransferError("peer_unreachable", f"{where}: {_first_line(str(e))}") from e


def _while_wanted(
    chunks: Iterable[memoryview], wanted: Callable[[], bool], name: SnapshotName
) -> Iterator[memoryview]:
    for chunk in chunks:
        if not wanted():
            raise TransferError("refused", f"{name} is not wanted any more")
        yield chunk


def _expect(view: memoryview, image: Image) -> int:
    """The size of the sealed image in a slot, if it is the one that is meant."""
    try:
        info = tiers.read_image(view)
    except tiers.ImageError as e:
        raise TransferError("snapshot_missing", f"{image.path}: {e}") from e
    if (info.rank, info.generation, info.step) != (image.rank, image.generation, image.step):
        raise TransferError(
            "snapshot_missing",
            f"{image.path} holds generation {info.generation}, step {info.step} of rank {info.rank} by now",
        )
    return info.nbytes


def _first_line(text: str) -> str:
    """gRPC appends its debugging context; the log has it."""
    return text.splitlines()[0].partition(". gRPC client debug context")[0] if text else ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
