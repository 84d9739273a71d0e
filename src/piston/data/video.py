"""(video file, integer frame numbers) → exactly those frames as uint8 RGB, or an error that names the frame.

Frame k is the k-th frame in presentation order. A file is demuxed once (`index_video`: no decoding) to learn the
presentation time of every frame and its keyframes; from then on a frame number becomes a presentation timestamp, the
decoder starts at the last keyframe shown at or before it, and a decoded frame is taken by its timestamp, never by
counting and never by a search in seconds. So streams with B-frames, open GOPs, edit lists or a first timestamp other
than zero are as exact as an all-intra one.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.container import InputContainer
from av.error import FFmpegError, InvalidDataError
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream
from jaxtyping import Float64, Int64, UInt8

from piston.data import handles
from piston.data.problems import Fault, file_fault

# Codecs whose frames are stored in the order in which they are shown: the container's own table holds their timestamps.
_STORED_IN_ORDER = frozenset({"av1", "vp9", "mjpeg"})
_REORDER = 4  # frames a decoder may hold back: a seek costs about this many more than it shows


class VideoFault(ValueError):
    """A video file that cannot be used; `fault` says why."""

    def __init__(self, path: str, fault: Fault) -> None:
        self.fault = fault
        super().__init__(str(fault.problem(file=path)))


@dataclass(frozen=True, eq=False)
class VideoIndex:
    """What one demuxing pass knows of a video file: the timestamp of every frame shown, and where decoding can start.

    Timestamps count `time_base` seconds. `count` frames can be read; `listed` is the number that the container's table
    promises (0: it does not say). Times on a regular grid are kept as `first + k·step`, others as an array.
    """

    path: str
    size: int  # bytes; a change of it means that the index is stale
    width: int
    height: int
    codec: str
    pix_fmt: str
    time_base: float  # seconds per tick
    count: int
    listed: int
    first: int
    step: int
    irregular: Int64[np.ndarray, "n"] | None
    key_pts: Int64[np.ndarray, "k"]  # ascending
    key_dts: Int64[np.ndarray, "k"]  # of the same keyframes: where the demuxer seeks

    def pts(self, numbers: Int64[np.ndarray, "n"]) -> Int64[np.ndarray, "n"]:
        """Presentation timestamps of frames 0 ≤ number < count, in ticks."""
        return self.first + numbers * self.step if self.irregular is None else self.irregular[numbers]

    def seconds(self, numbers: Int64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
        """Presentation times as the container states them, in seconds (the first need not be 0)."""
        return self.pts(numbers) * self.time_base

    def pts_at(self, number: int) -> int:
        """`pts` of one frame."""
        return self.first + number * self.step if self.irregular is None else int(self.irregular[number])

    def seconds_at(self, number: int) -> float:
        """`seconds` of one frame."""
        return self.pts_at(number) * self.time_base

    def rank(self, pts: int) -> int:
        """Number of the last frame shown at or before `pts`; -1 and less before the first."""
        if self.irregular is None:
            return min((pts - self.first) // self.step, self.count - 1) if self.count else -1
        return int(np.searchsorted(self.irregular, pts, side="right")) - 1

    @functools.cached_property
    def fps(self) -> float | None:
        """Frames per second by the timestamps themselves; None for fewer than two frames."""
        if self.count < 2:
            return None
        return (self.count - 1) / (self.seconds_at(self.count - 1) - self.seconds_at(0))

    @functools.cached_property
    def longest_gop(self) -> int:
        """Most frames between two keyframes: what a random read may have to decode."""
        starts = [max(0, self.rank(int(pts))) for pts in self.key_pts]
        return int(np.diff([*starts, self.count]).max()) if starts else 0

    def is_keyframe(self, number: int) -> bool:
        """Whether decoding can start at this frame."""
        pts = self.pts_at(number)
        at = int(np.searchsorted(self.key_pts, pts))
        return at < len(self.key_pts) and int(self.key_pts[at]) == pts


def index_video(path: Path | str) -> VideoIndex:
    """Demuxes a file once, decoding nothing. Raises VideoFault for an absent, empty, foreign or unreadable file.

    A file cut short yields the frames that are whole (`count` < `listed`).
    """
    path = Path(path)
    fault = file_fault(path, "video")
    if fault is not None:
        raise VideoFault(str(path), fault)
    try:
        for demux in (_from_table, _from_packets):
            with _open(path) as container:
                stream = _video_stream(container, path)
                packets = demux(container, stream, path.stat().st_size)
                if packets is not None:
                    return _index(path, stream, packets)
    except FFmpegError as error:
        raise VideoFault(str(path), _unreadable(error.strerror or str(error))) from error
    raise AssertionError("unreachable: packets can always be read")


def _unreadable(reason: str) -> Fault:
    return Fault(
        "unreadable-video",
        "video file cannot be opened",
        reason,
        "a complete video file",
        "it is cut short or not a video: download or encode it again, or leave the episode out (bad_episodes=skip)",
    )


def _open(path: Path | str) -> InputContainer:
    return av.open(str(path), mode="r", metadata_errors="ignore")


def _video_stream(container: InputContainer, path: Path) -> VideoStream:
    if not container.streams.video:
        raise VideoFault(
            str(path),
            Fault(
                "no-video-stream",
                "file has no video stream",
                f"{len(container.streams)} stream(s) of other kinds",
                "one video stream",
                "encode the file again, or leave the episode out (bad_episodes=skip)",
            ),
        )
    stream = container.streams.video[0]
    if stream.codec_context is None:
        raise VideoFault(str(path), _unreadable("its codec is unknown"))
    stream.codec_context.thread_type = "NONE"  # loader workers are the parallelism
    stream.codec_context.thread_count = 1
    return stream


@dataclass(frozen=True)
class _Packets:
    """Timestamps in stored order: pts, dts, whether a keyframe, whether an edit list hides it."""

    pts: Int64[np.ndarray, "n"]
    dts: Int64[np.ndarray, "n"]
    key: np.ndarray
    hidden: np.ndarray
    listed: int


def _from_table(container: InputContainer, stream: VideoStream, size: int) -> _Packets | None:
    """The container's own sample table, for codecs that store frames in order; None where it does not say enough.

    Five times cheaper than reading every packet. The table holds decoding times; they are presentation times if the
    first packet's two are equal and frames are never reordered. A frame whose bytes lie past the end of the file is
    not there.
    """
    entries = stream.index_entries
    if stream.codec.canonical_name not in _STORED_IN_ORDER or not 0 < len(entries) == stream.frames:
        return None
    table = np.array([(e.timestamp, e.pos + e.size, e.is_keyframe, e.is_discard) for e in entries], np.int64)
    whole = int(np.argmax(table[:, 1] > size)) if (table[:, 1] > size).any() else len(table)
    first = next(container.demux(stream))
    if first.pts is None or first.pts != first.dts or first.pts != table[0, 0]:
        return None
    table = table[:whole]
    return _Packets(table[:, 0], table[:, 0], table[:, 2] != 0, table[:, 3] != 0, stream.frames)


def _from_packets(container: InputContainer, stream: VideoStream, size: int) -> _Packets | None:
    """Every packet read once, in stored order, up to the first that is cut short."""
    rows: list[tuple[int, int, bool, bool]] = []
    try:
        for packet in container.demux(stream):
            if packet.size == 0 or packet.is_corrupt or packet.pts is None:  # an empty packet marks the end
                break
            dts = packet.pts if packet.dts is None else packet.dts
            rows.append((packet.pts, dts, packet.is_keyframe, packet.is_discard))
    except (InvalidDataError, EOFError):
        pass  # cut short in the middle of a packet: what was read before it counts
    table = np.array(rows, np.int64).reshape(-1, 4)
    return _Packets(table[:, 0], table[:, 1], table[:, 2] != 0, table[:, 3] != 0, stream.frames)


def _index(path: Path, stream: VideoStream, packets: _Packets) -> VideoIndex:
    pts = np.sort(packets.pts[~packets.hidden])
    if len(pts) == 0:
        raise VideoFault(str(path), _unreadable("no frame in it"))
    steps = np.diff(pts)
    if (steps <= 0).any():
        at = int(np.argmax(steps <= 0))
        raise VideoFault(
            str(path),
            Fault(
                "repeated-timestamp",
                "two frames have the same presentation time",
                f"frames {at} and {at + 1} at {pts[at] * float(stream.time_base or 0):.4f} s",
                "strictly increasing times",
                "encode the video again at a constant frame rate",
            ),
        )
    regular = len(steps) == 0 or bool((steps == steps[0]).all())
    order = np.argsort(packets.pts[packets.key])
    assert stream.time_base is not None
    return VideoIndex(
        path=str(path),
        size=path.stat().st_size,
        width=stream.width,
        height=stream.height,
        codec=stream.codec.canonical_name,
        pix_fmt=stream.codec_context.pix_fmt or "",
        time_base=float(stream.time_base),
        count=len(pts),
        listed=max(stream.frames - int(packets.hidden.sum()), 0),
        first=int(pts[0]),
        step=int(steps[0]) if len(steps) else 1,
        irregular=None if regular else pts,
        key_pts=packets.pts[packets.key][order],
        key_dts=packets.dts[packets.key][order],
    )


def read_frames(index: VideoIndex, numbers: Sequence[int | np.integer] | np.ndarray) -> UInt8[np.ndarray, "n H W 3"]:
    """The frames with these numbers, in the order asked, uint8 RGB; frames between two keyframes are decoded once.

    The open decoder is kept by this thread (see handles.py). Raises ValueError, naming file and frame, for a number
    outside 0 … count-1 and for a frame that does not decode.
    """
    wanted, place = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
    frames = np.empty((len(wanted), index.height, index.width, 3), np.uint8)
    if len(wanted) and (wanted[0] < 0 or wanted[-1] >= index.count):
        bad = int(wanted[0] if wanted[0] < 0 else wanted[-1])
        raise ValueError(
            f"frame {bad} of {index.path} does not exist: the video has frames 0 … {index.count - 1}; the data set's "
            "offsets or lengths do not fit its video: run `piston data check`"
        )
    key = (index.path, index.size)
    decoder = handles.opened(key, lambda: Decoder(index))
    try:
        for n, number in enumerate(wanted):
            frames[n] = decoder.read(int(number))
    except ValueError:
        handles.discard(key)
        raise
    return frames if np.array_equal(place, np.arange(len(wanted))) else frames[place]


class _DamagedFrame(Exception):
    """A frame that the decoder could not restore; leads to another try from an earlier keyframe."""


class Decoder:
    """One open video file. Frames read in ascending order share the decoding between keyframes. Not thread-safe."""

    def __init__(self, index: VideoIndex) -> None:
        self._index = index
        fault = file_fault(Path(index.path), "video")
        if fault is not None:
            raise VideoFault(index.path, fault)
        size = Path(index.path).stat().st_size
        if size != index.size:
            raise ValueError(
                f"video file {index.path} has {size} bytes, expected the {index.size} it had when the data set was "
                "opened; it was changed in between: open the data set again"
            )
        try:
            self._container = _open(index.path)
            self._stream = _video_stream(self._container, Path(index.path))
        except FFmpegError as error:
            raise VideoFault(index.path, _unreadable(error.strerror or str(error))) from error
        self._reformatter = VideoReformatter()
        self._frames: Iterator[VideoFrame] = iter(())
        self._shown: int | None = None  # number of the last frame the decoder gave out

    def close(self) -> None:
        """Closes the file."""
        self._frames = iter(())
        self._container.close()

    def read(self, number: int) -> UInt8[np.ndarray, "H W 3"]:
        """Frame `number`, RGB. Raises ValueError if it does not decode, from its keyframe nor from earlier ones."""
        index = self._index
        key = max(0, int(np.searchsorted(index.key_pts, index.pts_at(number), side="right")) - 1)
        if len(index.key_pts) == 0:
            raise self._undecodable(number, "the video has no keyframe")
        first = index.rank(int(index.key_pts[key]))
        if self._shown is None or not self._shown < number <= self._shown + (number - first) + _REORDER:
            self._seek(key)
        reason = ""
        for earlier in (None, key, max(0, key - 2), 0):
            try:
                if earlier is not None:
                    self._seek(earlier)
                return self._rgb(self._decode_to(number), number)
            except FFmpegError as error:
                reason = error.strerror or str(error)
            except _DamagedFrame as error:
                reason = str(error)
        raise self._undecodable(number, reason)

    def _decode_to(self, number: int) -> VideoFrame:
        """Decodes on until frame `number`. A damaged frame spoils those that follow it up to the next start."""
        pts = self._index.pts_at(number)
        for frame in self._frames:
            if frame.pts is None:
                raise _DamagedFrame("a decoded frame has no timestamp")
            if frame.is_corrupt:
                raise _DamagedFrame(f"frame {self._index.rank(frame.pts)}, on the way to it, is damaged")
            if frame.pts > pts:
                raise _DamagedFrame("the decoder left it out")
            self._shown = self._index.rank(frame.pts)
            if frame.pts == pts:
                return frame
        raise _DamagedFrame("the stream ends before it")

    def _seek(self, key: int) -> None:
        """Starts decoding at keyframe `key` (in order of presentation)."""
        self._container.seek(int(self._index.key_dts[key]), stream=self._stream, backward=True)
        self._shown = None
        self._frames = self._decoded(int(self._index.key_pts[key]))

    def _decoded(self, key_pts: int) -> Iterator[VideoFrame]:
        """Frames in order of presentation from a keyframe on.

        Leading frames of an open GOP, shown before it, need the keyframe before: they may fail here and are left out.
        """
        decoder = self._stream.codec_context
        for packet in self._container.demux(self._stream):
            whole = packet.size > 0 and not packet.is_corrupt
            try:
                frames = decoder.decode(packet if whole else None)  # None: the end, give out what was held back
            except FFmpegError:
                if packet.pts is not None and packet.pts < key_pts:
                    continue
                raise
            yield from (frame for frame in frames if frame.pts is None or frame.pts >= key_pts)
            if not whole:
                return

    def _rgb(self, frame: VideoFrame, number: int) -> UInt8[np.ndarray, "H W 3"]:
        if (frame.height, frame.width) != (self._index.height, self._index.width):
            raise ValueError(
                f"frame {number} of {self._index.path} is {frame.height}×{frame.width}, the file begins with "
                f"{self._index.height}×{self._index.width}; the frame size changes inside the video: encode it again"
            )
        return self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()

    def _undecodable(self, number: int, reason: str) -> ValueError:
        return ValueError(
            f"frame {number} of {self._index.path} cannot be decoded ({reason}); expected a whole {self._index.codec} "
            "frame: the file is damaged, which no option can skip (files are demuxed when opened, not decoded): "
            "download or encode it again, or take its episode out of the data set"
        )
