"""Frames by number: exact against a sequential decode of the whole file, for every codec and container habit."""

import multiprocessing
import threading
import warnings
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from make_sets import X264, X264_B, X264_LONG, code_frame, code_of, write_video

from piston.data import handles
from piston.data.video import VideoFault, VideoIndex, index_video, read_frames

N = 40
EPISODES = [[code_frame(0, 0, i) for i in range(N)]]
JITTER = np.cumsum(np.random.default_rng(0).integers(20, 47, N)).tolist()
OPEN_GOP = {"g": "10", "bf": "3", "x264-params": "open-gop=1:scenecut=0:keyint=10:bframes=3:b-pyramid=normal"}
HEVC = {"x265-params": "keyint=12:open-gop=1:bframes=4:log-level=none"}

WRITERS: dict[str, Callable[[Path], None]] = {
    "h264 g=2": lambda path: write_video(path, EPISODES, 10, options=X264),
    "h264 g=2 with B-frames": lambda path: write_video(path, EPISODES, 10, options=X264_B),
    "h264 g=250 with B-frames": lambda path: write_video(path, EPISODES, 10, options=X264_LONG),
    "h264 open GOP": lambda path: write_video(path, EPISODES, 30, options=OPEN_GOP),
    "h264 without edit list": lambda path: write_video(
        path, EPISODES, 30, options=X264_B, container={"use_editlist": "0"}
    ),
    "h264 fragmented": lambda path: write_video(
        path, EPISODES, 30, options=X264_B, container={"movflags": "frag_keyframe+empty_moov"}
    ),
    "h264 faststart": lambda path: write_video(path, EPISODES, 30, options=X264, container={"movflags": "faststart"}),
    "h264 late start": lambda path: write_video(path, EPISODES, 30, options=X264_B, start_pts=7),
    "h264 29.97 fps": lambda path: write_video(path, EPISODES, Fraction(30000, 1001), options=X264_B),
    "h264 uneven times": lambda path: write_video(path, EPISODES, 30, options=X264_B, times=JITTER, ticks=1000),
    "hevc open GOP": lambda path: write_video(path, EPISODES, 30, "libx265", HEVC),
    "av1 g=2": lambda path: write_video(path, EPISODES, 30, "libsvtav1", {"g": "2", "crf": "30", "preset": "10"}),
    "av1 g=30": lambda path: write_video(path, EPISODES, 30, "libsvtav1", {"g": "30", "crf": "30", "preset": "10"}),
    "vp9": lambda path: write_video(path, EPISODES, 30, "libvpx-vp9", {"g": "15"}),
    "mpeg4 with B-frames": lambda path: write_video(path, EPISODES, 30, "mpeg4", {"g": "12", "bf": "2"}),
}


def sequential(path: Path) -> np.ndarray:
    """All frames of a file in order of presentation: the second way to decode, without index or seek."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("videos")


@pytest.fixture(scope="module", params=list(WRITERS))
def video(request: pytest.FixtureRequest, folder: Path) -> Path:
    path = folder / f"{request.param}.mp4"
    WRITERS[request.param](path)
    return path


def test_frames_equal_a_sequential_decode(video: Path) -> None:
    index, truth = index_video(video), sequential(video)
    assert index.count == len(truth) == N
    order = np.random.default_rng(1).permutation(N)
    one_by_one = np.stack([read_frames(index, [int(n)])[0] for n in order])
    np.testing.assert_array_equal(one_by_one, truth[order])
    np.testing.assert_array_equal(read_frames(index, order), truth[order])
    np.testing.assert_array_equal(read_frames(index, range(N)), truth)
    some = [5, 3, 5, N - 1, 0, 3]
    np.testing.assert_array_equal(read_frames(index, some), truth[some])
    assert [code_of(frame)[2] for frame in read_frames(index, order)] == order.tolist()


def test_stored_order_codecs_use_the_container_table(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AV1's index from the sample table equals the one from packets."""
    path = folder / "table.mp4"
    WRITERS["av1 g=30"](path)
    fast = index_video(path)
    monkeypatch.setattr("piston.data.video._STORED_IN_ORDER", frozenset())
    slow = index_video(path)
    for name in ("count", "listed", "first", "step", "time_base", "codec"):
        assert getattr(fast, name) == getattr(slow, name)
    np.testing.assert_array_equal(fast.key_pts, slow.key_pts)
    np.testing.assert_array_equal(fast.key_dts, slow.key_dts)


def test_index_knows_rate_keyframes_and_times(folder: Path) -> None:
    path = folder / "known.mp4"
    write_video(path, [EPISODES[0][:15], EPISODES[0][15:]], 10, options=X264_LONG)
    index = index_video(path)
    assert (index.height, index.width, index.codec, index.pix_fmt) == (32, 48, "h264", "yuv420p")
    assert index.fps == pytest.approx(10)
    assert index.irregular is None
    assert [index.is_keyframe(n) for n in (0, 1, 15, 16)] == [True, False, True, False]
    assert index.longest_gop == 25
    np.testing.assert_allclose(index.seconds(np.arange(N)), np.arange(N) / 10)


def test_uneven_times_are_kept(folder: Path) -> None:
    path = folder / "uneven.mp4"
    WRITERS["h264 uneven times"](path)
    index = index_video(path)
    assert index.irregular is not None
    seconds = index.seconds(np.arange(N))
    np.testing.assert_allclose(seconds - seconds[0], (np.array(JITTER) - JITTER[0]) / 1000, atol=1e-4)


def test_one_frame_video(folder: Path) -> None:
    path = folder / "one.mp4"
    write_video(path, [EPISODES[0][:1]], 10)
    index = index_video(path)
    assert (index.count, index.fps) == (1, None)
    assert code_of(read_frames(index, [0])[0]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (None, "missing-video"),
        (b"", "empty-video"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "lfs-pointer"),
        (b"this is no video" * 1000, "unreadable-video"),
    ],
)
def test_files_that_are_no_video(tmp_path: Path, content: bytes | None, kind: str) -> None:
    path = tmp_path / "x.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(VideoFault) as error:
        index_video(path)
    assert error.value.fault.kind == kind
    assert str(path) in str(error.value)


def test_sound_without_pictures(tmp_path: Path) -> None:
    path = tmp_path / "sound.mp4"
    with av.open(str(path), "w") as out:
        stream = out.add_stream("aac", rate=44100)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            out.mux(packet)
    with pytest.raises(VideoFault, match="no video stream"):
        index_video(path)


def test_truncated_file_without_its_table(tmp_path: Path) -> None:
    path = tmp_path / "cut.mp4"
    write_video(path, EPISODES, 30)
    path.write_bytes(path.read_bytes()[:-600])
    with pytest.raises(VideoFault, match="cut short"):
        index_video(path)


@pytest.mark.parametrize(("codec", "options"), [("libx264", X264), ("libsvtav1", {"g": "2", "preset": "10"})])
def test_truncated_file_with_its_table_gives_the_whole_frames(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    path = tmp_path / "cut.mp4"
    write_video(path, EPISODES, 30, codec, options, {"movflags": "faststart"})
    truth = sequential(path)
    content = path.read_bytes()
    media = content.index(b"mdat")
    path.write_bytes(content[: media + (len(content) - media) // 2])
    index = index_video(path)
    assert index.listed == N
    assert 5 < index.count < N - 5
    np.testing.assert_array_equal(read_frames(index, range(index.count)), truth[: index.count])
    with pytest.raises(ValueError, match=f"frame {index.count} of .*does not exist"):
        read_frames(index, [index.count])


def test_a_damaged_frame_is_an_error_and_the_others_are_exact(tmp_path: Path) -> None:
    path = tmp_path / "damaged.mp4"
    write_video(path, EPISODES, 30, options=X264)
    truth, content = sequential(path), bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        at, size = packets[20].pos, packets[20].size
    assert at is not None
    content[at : at + size] = b"\x55" * size
    path.write_bytes(content)
    index = index_video(path)
    for n in np.random.default_rng(0).permutation(N):
        if n in (20, 21):  # the keyframe and the frame that needs it
            with pytest.raises(ValueError, match=f"frame {n} of {path}"):
                read_frames(index, [n])
        else:
            np.testing.assert_array_equal(read_frames(index, [n])[0], truth[n])


def test_frame_numbers_outside_the_file(video: Path) -> None:
    index = index_video(video)
    for n in (-1, N):
        with pytest.raises(ValueError, match=f"frame {n} of"):
            read_frames(index, [0, n])


def test_a_file_changed_since_it_was_indexed(folder: Path) -> None:
    path = folder / "changed.mp4"
    write_video(path, EPISODES, 30)
    index = index_video(path)
    write_video(path, [EPISODES[0][:20]], 30)
    with pytest.raises(ValueError, match="changed in between"):
        read_frames(index, [0])


def test_frame_size_that_changes_inside_a_file(tmp_path: Path) -> None:
    """Motion JPEGs of two sizes behind one header: every packet says its own size."""
    small, large, both = tmp_path / "a.mp4", tmp_path / "b.mp4", tmp_path / "both.mp4"
    write_video(small, [EPISODES[0][:4]], 30, "mjpeg")
    write_video(large, [[np.kron(frame, np.ones((2, 2, 1), np.uint8)) for frame in EPISODES[0][4:8]]], 30, "mjpeg")
    with av.open(str(small)) as a, av.open(str(large)) as b, av.open(str(both), "w") as out:
        stream = out.add_stream_from_template(a.streams.video[0])
        ticks = 0
        for packet in [*a.demux(video=0), *b.demux(video=0)]:
            if packet.size:
                packet.pts = packet.dts = ticks
                ticks += packet.duration or 512
                packet.stream = stream
                out.mux(packet)
    index = index_video(both)
    assert index.count == 8
    assert code_of(read_frames(index, [3])[0])[2] == 3
    with pytest.raises(ValueError, match=r"frame 5 of .*frame size changes"):
        read_frames(index, [5])


def test_open_files_are_bounded(folder: Path) -> None:
    path = folder / "many.mp4"
    write_video(path, [EPISODES[0][:3]], 30)
    handles.close_all()
    for n in range(handles.LIMIT + 5):
        copy = folder / f"many{n}.mp4"
        copy.write_bytes(path.read_bytes())
        assert code_of(read_frames(index_video(copy), [2])[0])[2] == 2
        assert handles.open_count() <= handles.LIMIT
    assert handles.open_count() == handles.LIMIT


def test_threads_do_not_share_decoders(folder: Path) -> None:
    path = folder / "threads.mp4"
    WRITERS["h264 g=250 with B-frames"](path)
    index = index_video(path)
    wrong: list[int] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(N)
        wrong.extend(int(n) for n in order if code_of(read_frames(index, [n])[0])[2] != n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _child(index: VideoIndex, numbers: list[int], results: "multiprocessing.SimpleQueue[object]") -> None:
    results.put(([code_of(frame)[2] for frame in read_frames(index, numbers)], handles.open_count()))


def test_a_forked_child_opens_its_own_decoder(folder: Path) -> None:
    path = folder / "fork.mp4"
    WRITERS["h264 g=250 with B-frames"](path)
    index = index_video(path)
    handles.close_all()
    assert code_of(read_frames(index, [10])[0])[2] == 10  # leaves the parent's decoder in the middle of the file
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks in threaded processes
        child = context.Process(target=_child, args=(index, [30, 2, 17], results))
        child.start()
    assert code_of(read_frames(index, [11])[0])[2] == 11
    numbers, count = results.get()
    child.join()
    assert (numbers, count) == ([30, 2, 17], 1)
