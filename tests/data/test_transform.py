"""From files to pixels: damaged JPEGs, colour profiles, transparent colours of 16 bits."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile, ImageFilter

from inpaint_bench.data import transform

from .test_folder import folder, reasons, save

END = b"\xff\xd9"
KINDS: dict[str, dict[str, Any]] = {
    "standard": {},
    "fine": {"quality": 95, "subsampling": 0},
    "optimized": {"optimize": True},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_rows": 1},
}
DAMAGE = {
    "half and an end marker": lambda content: content[: len(content) // 2] + END,
    "two thirds and an end marker": lambda content: content[: 2 * len(content) // 3] + END,
    "a hole": lambda content: _zeros(content, len(content) // 2, 1024),
    "a large hole": lambda content: _zeros(content, len(content) // 3, 4096),
    "zeros up to the end marker": lambda content: _zeros(content, len(content) // 2, len(content) // 2 - 2),
}


def _zeros(content: bytes, at: int, count: int) -> bytes:
    return content[:at] + bytes(count) + content[at + count :]


def scene(mode: str = "RGB") -> Image.Image:
    """Return a picture with edges and textures, as a photograph has."""
    noise = np.random.default_rng(0).integers(0, 256, (480, 640, 3), np.uint8)
    smooth = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(1.5))
    smooth.paste((200, 220, 240), (0, 0, 640, 120))
    return smooth.convert(mode)


def jpeg(image: Image.Image, **options: Any) -> bytes:
    """Return the image as the content of a file."""
    out = io.BytesIO()
    image.save(out, "JPEG", **options)
    return out.getvalue()


def check(content: bytes) -> None:
    """Decode and check a file."""
    with transform.open_image(io.BytesIO(content)) as image:
        transform.upright(image)
        transform.check_complete(image, content)


class TestDamagedJpegs:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("damage", DAMAGE)
    def test_missing_data_is_noticed(self, kind: str, damage: str) -> None:
        for mode in ("RGB", "L", "CMYK"):
            content = jpeg(scene(mode), **KINDS[kind])
            check(content)
            with pytest.raises((ValueError, OSError), match=r"early|zeros|truncated"):
                check(DAMAGE[damage](content))

    @pytest.mark.parametrize("kind", KINDS)
    def test_no_complete_image_is_discarded(self, kind: str) -> None:
        framed = Image.new("RGB", (900, 900), (128, 128, 128))
        framed.paste(scene(), (100, 100))
        even = [Image.new("RGB", (1600, 1200), colour) for colour in ("white", "black", (128, 128, 128))]
        for image in (scene(), framed, *even):
            content = jpeg(image, **KINDS[kind])
            check(content)
            check(content + b"more" * 100)
            check(content[:-2] + bytes(2000) + END)  # zeros after the last block
            check(content[:-2] + b"\0\1\2" + END)
            check(b"\xff\xd8\xff\xff" + content[3:])

    def test_preview_and_second_picture_are_not_mistaken_for_the_image(self) -> None:
        exif = Image.Exif()
        exif[0x010F] = "test"
        preview = jpeg(scene().resize((64, 48)))
        content = jpeg(scene(), exif=exif.tobytes(), comment=preview + bytes(1000))
        check(content)
        out = io.BytesIO()
        scene().save(out, "MPO", save_all=True, append_images=[scene().rotate(180)])
        check(out.getvalue())
        half = content[: len(content) // 2] + END
        with pytest.raises(ValueError, match="ends early"):
            check(half)

    def test_folder_lists_it_and_uses_the_others(self, tmp_path: Path) -> None:
        assert not ImageFile.LOAD_TRUNCATED_IMAGES
        save(tmp_path, ("a.jpg", scene()), ("b.jpg", scene().rotate(180)), ("c.jpg", scene().rotate(90)))
        for name, damage in (("b.jpg", "half and an end marker"), ("c.jpg", "a hole")):
            (tmp_path / name).write_bytes(DAMAGE[damage](jpeg(scene(), optimize=True)))
        source = folder(tmp_path)
        assert source.names == ["a.jpg"]
        assert set(reasons(source)) == {"b.jpg", "c.jpg"}
        assert reasons(source)["b.jpg"] == "damaged image: its data ends early"


def _profile(space: bytes, tags: dict[bytes, bytes], connection: bytes = b"XYZ ") -> bytes:
    """Return an ICC profile, version 2."""
    offset, table, data = 128 + 4 + 12 * len(tags), struct.pack(">I", len(tags)), b""
    for name, content in tags.items():
        content += bytes(-len(content) % 4)
        table += struct.pack(">4sII", name, offset + len(data), len(content))
        data += content
    size, white = 128 + len(table) + len(data), struct.pack(">3i", 63190, 65536, 54061)
    head = struct.pack(
        ">I4s4s4s4s4s12s4s", size, b"test", b"\2\x10\0\0", b"mntr", space, connection, bytes(12), b"acsp"
    )
    return head + bytes(28) + white + bytes(48) + table + data


def _xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + struct.pack(">3i", *(round(value * 65536) for value in values))


def _gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))


TEXTS = {b"desc": b"desc\0\0\0\0" + struct.pack(">I", 5) + b"test\0" + bytes(78), b"cprt": b"text\0\0\0\0none\0"}
WHITE = {**TEXTS, b"wtpt": _xyz(0.9642, 1.0, 0.8249)}
# XYZ (D50) of red, green and blue; the inverse of the matrix of sRGB. The curves are 2.2 and that of IEC 61966-2-1.
ADOBE_RGB = [[0.60974, 0.31111, 0.01947], [0.20528, 0.62567, 0.06087], [0.14919, 0.06322, 0.74457]]
DISPLAY_P3 = [[0.51512, 0.24120, -0.00105], [0.29198, 0.69225, 0.04189], [0.15710, 0.06657, 0.78407]]
TO_SRGB = np.array(
    [[3.1338561, -1.6168667, -0.4906146], [-0.9787684, 1.9161415, 0.0334540], [0.0719453, -0.2289914, 1.4052427]]
)


def matrix_profile(matrix: list[list[float]]) -> bytes:
    """Return the profile of a colour space with these primaries."""
    curves = {name: _gamma(2.2) for name in (b"rTRC", b"gTRC", b"bTRC")}
    primaries = {name: _xyz(*values) for name, values in zip((b"rXYZ", b"gXYZ", b"bXYZ"), matrix, strict=True)}
    return _profile(b"RGB ", {**WHITE, **curves, **primaries})


GREY = _profile(b"GRAY", {**WHITE, b"kTRC": _gamma(1.0)})
# From CMYK to Lab by the corners of a cube: without ink white, else a red.
CORNERS = bytes([255, 128, 128]) + bytes([160, 180, 150]) * 15
CMYK = _profile(
    b"CMYK",
    {
        **WHITE,
        b"A2B0": b"mft1\0\0\0\0\4\3\2\0"
        + struct.pack(">9i", *(65536 * (at % 4 == 0) for at in range(9)))
        + bytes(range(256)) * 4
        + CORNERS
        + bytes(range(256)) * 3,
    },
    b"Lab ",
)


def _chunk(kind: bytes, *values: int) -> bytes:
    data = struct.pack(f">{len(values)}I", *values)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


class TestColoursWithoutProfile:
    """Gamma and primaries of a PNG, and EXIF's word for another space than sRGB."""

    @pytest.mark.parametrize(
        ("chunks", "count"),
        [
            ([], True),
            ([_chunk(b"gAMA", 45455)], True),
            ([_chunk(b"gAMA", 45455), _chunk(b"cHRM", 31270, 32900, 64000, 33000, 30000, 60000, 15000, 6000)], True),
            ([_chunk(b"gAMA", 100_000)], False),
            ([_chunk(b"gAMA", 45455), _chunk(b"cHRM", 31270, 32900, 68000, 32000, 26500, 69000, 15000, 6000)], False),
        ],
        ids=["none", "gamma of sRGB", "primaries of sRGB", "linear", "Display P3"],
    )
    def test_png_in_another_space_is_told(self, tmp_path: Path, chunks: list[bytes], count: bool) -> None:
        Image.new("RGB", (40, 40)).save(tmp_path / "a.png")
        content = (tmp_path / "a.png").read_bytes()
        (tmp_path / "a.png").write_bytes(content[:33] + b"".join(chunks) + content[33:])
        with transform.open_image(tmp_path / "a.png") as image:
            assert transform.colours_count(image, transform.upright(image)) is count

    @pytest.mark.parametrize(("space", "count"), [(None, True), (1, True), (65535, False)])
    def test_jpeg_in_another_space_is_told(self, tmp_path: Path, space: int | None, count: bool) -> None:
        exif = Image.Exif()
        if space:
            exif[0x8769] = {0xA001: space}
        Image.new("RGB", (40, 40)).save(tmp_path / "a.jpg", exif=exif)
        with transform.open_image(tmp_path / "a.jpg") as image:
            assert transform.colours_count(image, transform.upright(image)) is count


class TestColourProfiles:
    def pixel(self, tmp_path: Path, image: Image.Image, profile: bytes, name: str = "a.png") -> list[int]:
        image.save(tmp_path / name, icc_profile=profile)
        with transform.open_image(tmp_path / name) as opened:
            upright = transform.upright(opened)
            assert transform.colour_transform(upright.info["icc_profile"], upright.mode)[0]
            pixel: list[int] = transform.center_square(upright, 40)[20, 20].tolist()
            return pixel

    @pytest.mark.parametrize("matrix", [ADOBE_RGB, DISPLAY_P3], ids=["Adobe RGB", "Display P3"])
    def test_colours_are_converted_to_srgb(self, tmp_path: Path, matrix: list[list[float]]) -> None:
        colour = (150, 110, 80)
        linear = TO_SRGB @ (np.array(matrix).T @ (np.array(colour) / 255) ** 2.2)
        expected = 255 * (1.055 * linear ** (1 / 2.4) - 0.055)
        assert np.abs(expected - colour).max() > 4
        for name in ("a.png", "a.jpg", "a.webp", "a.tif"):
            got = self.pixel(tmp_path, Image.new("RGB", (40, 40), colour), matrix_profile(matrix), name)
            with transform.open_image(tmp_path / name) as image:
                assert transform.version_of(image, transform.upright(image)) == transform.VERSION
            assert np.abs(got - expected).max() <= 4, name
        clear = Image.new("RGBA", (40, 40), (*colour, 0))
        assert self.pixel(tmp_path, clear, matrix_profile(matrix)) == [255, 255, 255]
        palette = Image.new("RGB", (40, 40), colour).quantize(4)
        assert np.abs(self.pixel(tmp_path, palette, matrix_profile(matrix)) - expected).max() <= 2

    def test_srgb_itself_changes_nothing(self, tmp_path: Path) -> None:
        profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
        square = scene().crop((0, 0, 480, 480))
        square.save(tmp_path / "a.png", icc_profile=profile)
        with transform.open_image(tmp_path / "a.png") as image:
            assert np.array_equal(transform.center_square(transform.upright(image), 480), np.asarray(square))

    def test_grey_and_cmyk_have_profiles_of_their_own(self, tmp_path: Path) -> None:
        assert self.pixel(tmp_path, Image.new("L", (40, 40), 55), GREY)[0] == pytest.approx(128, abs=2)
        assert self.pixel(tmp_path, Image.new("L", (40, 40), 55), matrix_profile(ADOBE_RGB))[0] == pytest.approx(
            55, abs=4
        )
        red, green, _ = self.pixel(tmp_path, Image.new("CMYK", (40, 40), (0, 0, 0, 255)), CMYK, "a.jpg")
        assert red > green + 40
        assert self.pixel(tmp_path, Image.new("CMYK", (40, 40)), CMYK, "a.jpg") == [255, 255, 255]

    def test_unusable_profile_is_said_and_the_image_used_as_it_is(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        save(
            tmp_path,
            *((f"{name}.png", Image.new("RGB", (40, 40), (200, 100, number))) for number, name in enumerate("abcd")),
        )
        for number, (name, profile) in enumerate((("b", b"no profile"), ("c", CMYK), ("d", GREY))):
            colour = (200, 100, number + 1)
            Image.new("RGB", (40, 40), colour).save(tmp_path / f"{name}.png", icc_profile=profile)
        source = folder(tmp_path)
        assert source.names == ["a.png", "b.png", "c.png", "d.png"]
        assert [source.pixels(at)[16, 16].tolist() for at in range(4)] == [[200, 100, blue] for blue in range(4)]
        assert "3 of 4 images have a colour profile that cannot be used" in caplog.text
        assert "b.png, c.png, d.png" in caplog.text


class TestTransparentColours:
    def png(self, path: Path, colour: int, values: np.ndarray[Any, Any], clear: bytes) -> Path:
        """Write a PNG of 16 bits, which Pillow does not do with a transparent colour."""
        height, width = values.shape[:2]
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        chunks = {b"IHDR": struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0), b"tRNS": clear}
        chunks = {name: content for name, content in chunks.items() if content}
        chunks |= {b"IDAT": zlib.compress(rows), b"IEND": b""}
        content = b"\x89PNG\r\n\x1a\n"
        for name, chunk in chunks.items():
            content += struct.pack(">I", len(chunk)) + name + chunk + struct.pack(">I", zlib.crc32(name + chunk))
        path.write_bytes(content)
        return path

    @pytest.mark.parametrize("colour", [0, 2, 4, 6], ids=["grey", "RGB", "grey and alpha", "RGBA"])
    def test_sixteen_bits_are_as_transparent_as_eight(self, tmp_path: Path, colour: int) -> None:
        values = np.full((40, 40), 0x9234)
        values[:, :20] = 0x1234
        layers = np.stack([values] * (3 if colour & 2 else 1), axis=2)
        clear = struct.pack(">H", 0x1234) * (3 if colour & 2 else 1)
        if colour & 4:
            layers, clear = np.dstack([layers, np.where(values == 0x1234, 0, 65535)]), b""
        with transform.open_image(self.png(tmp_path / "a.png", colour, layers, clear)) as image:
            pixels = transform.center_square(transform.upright(image), 40).astype(int)
        assert (pixels[:, :20] == 255).all()
        assert np.abs(pixels[:, 20:] - 0x92).max() <= 1
