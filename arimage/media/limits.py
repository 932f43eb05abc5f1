"""How much work the file of an image may ask for: checked before a decoder or Pillow's reader of EXIF data sees it."""

import math
import re
import struct

from PIL import Image


# Of a progressive JPEG: encoders write about ten, and each goes over the whole image.
MAX_SCANS = 64
# Segments of a JPEG, chunks of a PNG; and those of a JPEG that are joined, all of them for each one.
MAX_PARTS, MAX_EXIF_PARTS = 100_000, 64
# Of an animated file, and the pixels of all of them.
MAX_FRAMES = 10_000
MAX_ANIMATED_PIXELS = 2**28
# Of the frames of a video that are read: 3 GB.
MAX_VIDEO_PIXELS = 2**30

# Where an image is resized to cover a size, a side more than `LONG` times as long as its shown part is cropped first.
# On either side of that part `MARGIN` pixels stay for the filter, times the factor that the image shrinks by.
LONG, MARGIN = 8, 8

# The markers of JPEG data that begin a segment, and that of its end; others are stuffing, fill bytes and restarts.
_MARKER = re.compile(rb"\xff[\x02-\xcf\xd9-\xfe]")
SCAN, END = 0xDA, 0xD9
# Bytes of a value of each type of TIFF, by number; 1 for the others.
_SIZES = {3: 2, 4: 4, 5: 8, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8}


def too_much(data: bytes) -> str | None:
    """What a file has too much of, as the end of "FILE has"; None if all is well."""
    if data.startswith(b"\xff\xd8"):
        return _too_much_jpeg(data)
    if data.startswith(b"\x89PNG"):
        return _too_much_png(data)
    return too_much_exif(data) if data.startswith((b"II", b"MM")) else None


def _too_much_jpeg(data: bytes) -> str | None:
    scans = parts = 0
    exif = []
    found = _MARKER.search(data, 2)
    while found:
        code, begin = data[found.start() + 1], found.end()
        length = max(2, int.from_bytes(data[begin : begin + 2]))
        if code == END:
            # Pillow looks for the first scan even after an end.
            if scans:
                break
            length = 0
        parts, scans = parts + 1, scans + (code == SCAN)
        if scans > MAX_SCANS or parts > MAX_PARTS:
            return f"more than {MAX_SCANS} scans" if scans > MAX_SCANS else f"more than {MAX_PARTS} parts"
        segment = data[begin + 2 : begin + length] if code in (0xE1, 0xE2) else b""
        if segment.startswith(b"Exif\0\0"):
            exif.append(segment[6:])
            if len(exif) > MAX_EXIF_PARTS:
                return f"more than {MAX_EXIF_PARTS} parts of EXIF data"
        if segment.startswith(b"MPF\0") and (reason := too_much_exif(segment[4:])):
            return reason
        found = _MARKER.search(data, begin + length)
    return too_much_exif(b"".join(exif))


def _too_much_png(data: bytes) -> str | None:
    place, parts, profiles = 8, 0, 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 4])
        parts, profiles = parts + 1, profiles + (data[place + 4 : place + 8] == b"iCCP")
        if parts > MAX_PARTS:
            return f"more than {MAX_PARTS} parts"
        # Each may hold a megabyte, compressed to a kilobyte.
        if profiles > 1:
            return "more than one colour profile"
        place += length + 12
    return None


def too_much_exif(data: bytes) -> str | None:
    """What EXIF data, or a TIFF file, has too much of: Pillow copies the value of every entry of its first directory,
    and all of them may claim the same bytes."""
    data = data.removeprefix(b"Exif\0\0")
    order = "<" if data.startswith(b"II") else ">"
    # BigTIFF has 64 bits where others have 32.
    big = 43 in data[2:4]
    at, word, count, entry = (8, "Q", "Q", "HHQ8x") if big else (4, "L", "H", "HHL4x")
    size = struct.calcsize(order + entry)
    try:
        (begin,) = struct.unpack_from(order + word, data, at)
        (entries,) = struct.unpack_from(order + count, data, begin)
    except (struct.error, OverflowError):
        return None
    begin += struct.calcsize(order + count)
    table = data[begin : begin + entries * size]
    table = table[: len(table) // size * size]
    claimed = sum(number * _SIZES.get(kind, 1) for _, kind, number in struct.iter_unpack(order + entry, table))
    return f"entries of {claimed} bytes in {len(data)} bytes of EXIF data" if claimed > 4 * len(data) + 2**16 else None


def check_pixels(name: str, image: Image.Image, frames: int = 1) -> None:
    """Refuse an image of more pixels than Pillow calls safe (`PIL.Image.MAX_IMAGE_PIXELS`), or an animated one of too
    many frames or pixels in all of them, without reading them."""
    pixels, most = image.width * image.height, Image.MAX_IMAGE_PIXELS
    if most is not None and pixels > most:
        raise ValueError(f"{name} has {image.width}x{image.height} pixels, more than {most}: give a smaller one")
    if frames > 1 and (frames > MAX_FRAMES or frames * pixels > MAX_ANIMATED_PIXELS):
        raise ValueError(
            f"{name} has {frames} frames of {image.width}x{image.height} pixels: give at most {MAX_FRAMES}, and at "
            f"most {MAX_ANIMATED_PIXELS} pixels in all of them"
        )


def shown_part(given: tuple[int, int], size: tuple[int, int]) -> tuple[slice, slice]:
    """The rows and columns that are needed of an image of `given` height and width, which is resized to cover `size`
    and cropped around its centre: all of them, except of a very long image, which would take gigabytes when resized.
    """
    scale = max(wanted / there for wanted, there in zip(size, given, strict=True))
    margin = MARGIN * max(1, 1 / scale)
    found = []
    for there, wanted in zip(given, size, strict=True):
        needed = wanted / scale
        # As much on either side, so that the centre stays.
        left_out = max(0, math.floor((there - needed) / 2 - margin)) if there > LONG * needed else 0
        found.append(slice(left_out, there - left_out))
    return found[0], found[1]


def long_cropped(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The `shown_part` of an image."""
    rows, columns = shown_part((image.height, image.width), size)
    box = columns.start, rows.start, columns.stop, rows.stop
    return image if box == (0, 0, *image.size) else image.crop(box)
