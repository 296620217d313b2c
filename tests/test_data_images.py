"""Images of every mode and type, and arrays beside them, through every way in: equal to a plain reading, or refused."""

import jax
import ml_dtypes
import numpy as np
import pandas as pd
import pytest
from PIL import Image, ImageOps

from jfcl.core import check_clients
from jfcl.data import (
    Dataset,
    build,
    from_arrays,
    from_frame,
    from_huggingface,
    from_torch,
    generate_store,
    read_rows,
)
from jfcl.data.values import array_beside

MODES = ("1", "L", "P", "PA", "LA", "La", "RGB", "RGBX", "RGBA", "RGBa", "CMYK", "YCbCr", "LAB", "HSV")
MODES += ("I", "I;16", "I;16L", "I;16B", "F", "P with transparency", "L with transparency")
TYPES = ("uint8", "uint16", "int16", "int32", "int64", "bool", "float16", "float32", "float64", "bfloat16")
SIDE = 6


def an_image(rng, mode):
    """An image of PIL of random content, of `SIDE` x `SIDE` pixels."""
    pixels = rng.integers(0, 256, (SIDE, SIDE, 4)).astype(np.uint8)
    mode, _, transparent = mode.partition(" with ")
    if mode == "F":
        return Image.fromarray(rng.random((SIDE, SIDE), np.float32))
    if mode.startswith("I"):
        kind = np.dtype({"I": "<i4", "I;16B": ">u2"}.get(mode, "<u2"))
        deep = rng.integers(0, 65536, (SIDE, SIDE)).astype(kind)
        return Image.frombytes(mode, (SIDE, SIDE), deep.tobytes())
    if mode == "1":
        return Image.fromarray(pixels[..., 0] > 127)
    image = Image.frombytes("P" if mode in ("P", "PA") else "L", (SIDE, SIDE), pixels[..., 0].tobytes())
    if mode in ("P", "PA"):
        image.putpalette(rng.integers(0, 256, 768).astype(np.uint8).tobytes())
        image = image if mode == "P" else image.convert("PA")
    elif mode != "L":
        bands = len(Image.new(mode, (1, 1)).getbands())
        image = Image.frombytes(mode, (SIDE, SIDE), pixels[..., :bands].tobytes())
    if transparent:
        image.info["transparency"] = int(pixels[0, 0, 0])
    return image


def shown(image):
    """The red, green, blue and alpha of an image in [0, 1], and which of colour and alpha it has; `None`: refused."""
    mode, stored = image.mode, np.asarray(image).astype(np.float64)
    alpha, white = np.ones((SIDE, SIDE)), np.full((SIDE, SIDE, 3), 255.0)
    if mode == "I":
        return None
    if mode in ("1", "F") or mode.startswith("I;16"):
        return np.repeat(stored[..., None], 3, -1) / (65535 if mode[0] == "I" else 1), alpha, False, False
    if mode in ("P", "PA"):
        index = stored if mode == "P" else stored[..., 0]
        colour = np.array(image.getpalette(), np.float64).reshape(-1, 3)[index.astype(int)]
        alpha = stored[..., 1] / 255 if mode == "PA" else alpha
    elif mode in ("L", "LA", "La"):
        colour = np.repeat(stored.reshape(SIDE, SIDE, -1)[..., :1], 3, -1)
        alpha = alpha if mode == "L" else stored[..., 1] / 255
    elif mode in ("RGB", "RGBX", "RGBA", "RGBa"):
        colour, alpha = stored[..., :3], stored[..., 3] / 255 if "A" in mode.upper() else alpha
    else:
        colour = np.asarray(image.convert("RGB"), np.float64)
    if mode in ("La", "RGBa"):  # multiplied by alpha, in bytes
        opaque = np.asarray(image.convert(mode.upper()), np.float64)
        colour = np.repeat(opaque[..., :1], 3, -1) if mode == "La" else opaque[..., :3]
    if "transparency" in image.info:
        alpha = (stored != image.info["transparency"]).astype(float)
    assert colour.shape == white.shape
    return (
        colour / 255,
        alpha,
        mode not in ("L", "LA", "La"),
        mode in ("LA", "La", "PA", "RGBA", "RGBa") or bool(image.info),
    )


def plain_pictures(images):
    """`[n, H, W, C]` of images of PIL, with the channels that all of them need; `None`: refused."""
    read = [shown(image) for image in images]
    if None in read:
        return None
    channels = 3 if any(one[2] for one in read) else 1
    made = [colour[..., :channels] for colour, *_ in read]
    if any(one[3] for one in read):
        made = [np.concatenate([c, one[1][..., None]], -1) for c, one in zip(made, read, strict=True)]
    return np.stack(made)


def arrays_of(rng, n, kind, forms=("HW", "HWC", "CHW", "CHW given")):
    """Random images of a type and of a random order of axes, and a plain reading of them; `None`: refused."""
    form = rng.choice([form for form in forms if form != "HW" or "float" not in kind])
    channels, height = int(rng.choice([1, 3, 4])), SIDE
    if form == "CHW given":
        height = 2  # [C, 2, 6] does not show its order
    shape = (n, height, SIDE) if form == "HW" else (n, height, SIDE, channels)
    top = {"uint8": 255, "uint16": 65535, "bool": 1}.get(kind)
    if "float" in kind:
        x = rng.random(shape).astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
        plain = x.astype(np.float64)
    else:
        x = rng.integers(0, (top or 100) + 1, shape).astype(kind)
        plain = None if top is None else x.astype(np.float64).reshape(*shape[:3], -1) / top
    given = True if form == "CHW given" else None
    return np.moveaxis(x, 3, 1) if form.startswith("CHW") else x, plain, given


def test_photographs_lie_as_their_maps_do():
    """The orientation that a file stores turns inputs, targets and further arrays."""
    rng = np.random.default_rng(0)
    for orientation in range(1, 9):
        photo, mask = (Image.fromarray(rng.integers(0, 3, shape).astype(np.uint8)) for shape in ((4, 6, 3), (4, 6)))
        wanted = {}
        for name, image in {"x": photo, "y": mask}.items():
            image.getexif()[0x0112] = orientation
            wanted[name] = np.asarray(ImageOps.exif_transpose(image))
        frame = pd.DataFrame({"x": [photo] * 2, "y": [mask] * 2, "w": [mask] * 2})
        for made in (from_frame(frame, x="x", y="y", extra="w").train, from_arrays([frame.to_dict("list")]).examples):
            x, y, w = (
                np.asarray(made[name]).reshape(-1, *made[name].shape[-3 if name == "x" else -2 :]) for name in "xyw"
            )
            np.testing.assert_allclose(x[0], wanted["x"] / np.float32(255), rtol=1e-6)
            np.testing.assert_array_equal(y[0], wanted["y"])
            np.testing.assert_array_equal(w[1], wanted["y"])


def test_new_images_have_the_channels_of_training_or_are_refused():
    colour, grey = Image.new("RGB", (2, 3), (0, 51, 255)), Image.new("L", (2, 3), 51)
    table = from_frame(pd.DataFrame({"x": [colour] * 2, "y": [0, 1]})).table
    assert read_rows(pd.DataFrame({"x": [grey]}), table)["x"].tolist() == [[[[np.float32(0.2)] * 3] * 2] * 3]
    for other in (colour.resize((3, 3)), colour.convert("RGBA"), Image.new("L", (0, 3))):
        with pytest.raises(ValueError, match=r"shape of an input must be|an image with pixels"):
            read_rows(pd.DataFrame({"x": [other]}), table)


class Stream:
    """The part of a streamed data set of Hugging Face that is read."""

    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)

    def __iter__(self):
        return (dict(zip(self.columns, row, strict=True)) for row in zip(*self.columns.values(), strict=True))


def turned(values, cluster, clusters):
    return np.rot90(values, 4 * cluster // clusters, axes=(0, 1))


def check_case(seed, tmp_path):
    """One random set of images by one random way in: every example is that of a plain reading, or all are refused."""
    rng = np.random.default_rng(seed)
    n, entry = 24, rng.choice(["arrays", "torch", "frame", "stream", "own", "store"])
    channels_first = None
    if entry != "own" and rng.random() < 0.6:
        kinds = rng.choice(MODES, rng.integers(1, 4))
        x = [an_image(rng, rng.choice(kinds)) for _ in range(n)]
        plain = plain_pictures(x)
    else:
        kind = rng.choice(TYPES)
        x, plain, channels_first = arrays_of(rng, n, kind)
        if entry == "own":  # images of floats alone, with their channels last
            x, plain, channels_first = arrays_of(rng, n, rng.choice(["uint8", "float32"]), ["HWC", "CHW"])
            plain = plain if x.dtype == np.float32 and x.shape[-1] <= 4 else None
    height = plain.shape[1] if plain is not None else SIDE
    y = rng.integers(0, 3, n).astype(np.int32)
    beside = {"row": np.arange(n), "w": rng.random(n), "mask": rng.integers(0, 5, (n, height, SIDE)).astype(np.uint8)}
    nested = entry in ("arrays", "torch", "own") and rng.random() < 0.5
    columns = {"image": x, "label": y, **beside} | ({"more": {"a": rng.random((n, 2)) < 0.5}} if nested else {})
    square = height == SIDE
    clusters = int(rng.choice([1, 2, 4])) if square else 1
    heterogeneity = "rotation" if clusters > 1 else "none"

    def federations():
        if entry in ("arrays", "torch"):
            cuts = [slice(0, 5), slice(5, 16), slice(16, n)]
            parts = [jax.tree.map(lambda v, c=c: v[c], columns, is_leaf=lambda v: isinstance(v, list)) for c in cuts]
            if entry == "arrays":
                return [(from_arrays(parts, channels_first=channels_first), None)]
            rows = [[jax.tree.map(lambda v, i=i: v[i], p, is_leaf=lambda v: isinstance(v, list)) for i in range(m)]
                    for p, m in zip(parts, (5, 11, 8), strict=True)]  # fmt: skip
            return [(from_torch(rows, channels_first=channels_first), None)]
        options = {"channels_first": channels_first, "extra": list(beside)}
        if entry == "own":
            names = {"x": x, "y": y} | {
                name: values for name, values in columns.items() if name not in ("image", "label")
            }
            data = Dataset("own", names, None, 3, None, "")
        elif entry == "stream":
            data = from_huggingface(Stream(columns), **options)
        else:
            data = from_frame(pd.DataFrame({name: list(values) for name, values in columns.items()}), **options)
        shared = {"num_clients": 4, "num_clusters": clusters, "heterogeneity": heterogeneity, "seed": seed}
        partition = str(rng.choice(["iid", "stratified", "dirichlet", "power_law"]))
        if entry == "store":
            stores = generate_store(tmp_path / str(seed), data, examples_per_client=4, **shared)
            return [(store.gather(np.arange(4)), store.cluster) for store in stores]
        fed = build(data, partition=partition, newcomer_examples=2 if clusters == 1 else None, **shared)
        made = [(fed.train, fed.cluster), (fed.test, fed.cluster), (fed.newcomers, fed.newcomer_cluster)]
        return [pair for pair in made if pair[0] is not None]

    if plain is None:
        with pytest.raises(ValueError, match=r"unknown white|floating-point|channels last"):
            federations()
        return "refused"
    seen = 0
    print(seed, entry)  # shown where it fails
    for clients, cluster in federations():
        check_clients(clients, allow_empty=True)
        examples = jax.tree.map(np.asarray, clients.examples)
        assert examples["x"].dtype == np.float32 and examples["y"].dtype == np.int32
        for i, size in enumerate(clients.size):
            k = 0 if cluster is None else int(cluster[i])
            for j in range(size):
                one = jax.tree.map(lambda values, i=i, j=j: values[i, j], examples)
                row = int(one["row"])
                np.testing.assert_allclose(one["x"], turned(plain[row], k, clusters), rtol=1e-6, atol=1e-7)
                np.testing.assert_array_equal(one["mask"], turned(beside["mask"][row], k, clusters))
                assert one["y"] == y[row] and one["w"] == pytest.approx(beside["w"][row], rel=1e-6)
                if nested:
                    np.testing.assert_array_equal(one["more"]["a"], columns["more"]["a"][row])
                seen += 1
            padding = jax.tree.map(lambda values, i=i, size=size: values[i, size:], examples)
            assert not any(leaf.any() for leaf in jax.tree.leaves(padding))
    assert seen >= 16
    return "read"


def test_images_by_every_way_in(tmp_path):
    found = [check_case(seed, tmp_path) for seed in range(16)]
    assert found.count("read") > 5 and "refused" in found


@pytest.mark.slow
def test_300_image_sets_by_every_way_in(tmp_path):
    found = [check_case(seed, tmp_path) for seed in range(16, 316)]
    assert found.count("read") > 100


# ---------------------------------------------------------------------------------------------------------
# What a random draw seldom meets


def test_mixed_modes_are_alike_in_all_clients_and_splits():
    red, blue = (Image.new("P", (6, 5), 0) for _ in range(2))
    red.putpalette([255, 0, 0])
    blue.putpalette([0, 0, 255])
    grey = Image.new("L", (6, 5), 51)
    x = from_arrays([([red, blue], [0, 1]), ([grey], [0]), ([Image.new("RGBA", (6, 5), (0, 0, 0, 0))], [0])]).examples
    assert x["x"].shape == (4 - 1, 2, 5, 6, 4)
    wanted = [[1, 0, 0, 1], [0, 0, 1, 1], [0.2, 0.2, 0.2, 1], [0, 0, 0, 0]]
    np.testing.assert_allclose(x["x"][[0, 0, 1, 2], [0, 1, 0, 0], 2, 3], wanted, rtol=1e-6)
    frames = [pd.DataFrame({"image": images, "label": 0}) for images in ([grey] * 2, [red])]
    data = from_frame(frames[0], test=frames[1])
    assert data.train["x"].shape == (2, 5, 6, 3) and data.test["x"][0, 0, 0].tolist() == [1, 0, 0]


def test_images_of_bytes_are_not_mixed_with_floats_beyond_their_range():
    y, white = [0, 1], np.full((2, 5, 5, 1), 255, np.uint8)
    for images in (white, [Image.new("L", (5, 5), 255)] * 2):
        assert from_arrays([(images, y), (white / 255, y)]).examples["x"].min() == 1
        for other in (white.astype(np.float32), white / 255 - 1.5):
            with pytest.raises(ValueError, match=r"client 1: x must be divided by the white, in \[0, 1\]"):
                from_arrays([(images, y), (other, y)])


def test_images_stand_as_they_are_shown(tmp_path):
    wide = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    turned_by_camera = Image.Exif()
    turned_by_camera[0x0112] = 6  # a quarter turn clockwise
    wide.save(tmp_path / "a.png", exif=turned_by_camera)
    x = from_arrays([([Image.open(tmp_path / "a.png")], [0])]).examples["x"][0, 0, :, :, 0]
    np.testing.assert_array_equal(np.rint(x * 255), np.rot90(np.asarray(wide), -1))


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (
            [Image.new("L", (5, 5)), np.zeros((5, 5), np.uint8)],
            "row 1 must be an image, as other rows are",
        ),
        (
            [Image.new("L", (5, 5)), Image.new("L", (5, 6))],
            r"size of row 1 must be \(5, 5\), .* got \(6, 5\)",
        ),
        (
            [Image.new("I", (5, 5))],
            "row 0 must be an array in .*one of mode 'I', of unknown white, in 0",
        ),
        ([Image.new("F", (5, 5), 2.0)], "mode 'F', of unknown white, in 2..2"),
        ([[Image.new("P", (5, 5))]], "must hold numbers, arrays, images or texts"),
        ([np.zeros((5, 5), np.uint8), np.zeros((5, 5), np.float32)], "row 1 is of float32, row 0 of uint8"),
        (np.zeros((1, 5, 5), np.int64), r"images of unknown white, int64 of shape \[5, 5\] an example"),
        (np.zeros((1, 25), np.uint8), r"or token ids as int32: bytes may be any, got .uint8 of shape \[25\]"),
        (np.zeros((1, 3, 32, 3), np.float32), r"channels_first must be True for .* \[3, 32, 3\]"),
        (np.zeros((1, 12, 32, 32), np.float32), r"channels_first must be True for .* \[12, 32, 32\]"),
        (np.zeros((1, 5, 5, 3), complex), "must hold numbers, arrays, images or texts"),
    ],
)
def test_what_may_be_several_things_is_refused(x, words):
    y = np.zeros(len(x), int)
    rows = [{"image": one, "label": 0} for one in x]
    frame = pd.DataFrame({"image": list(x), "label": y})
    for read in (lambda: from_arrays([(x, y)]), lambda: from_torch([rows]), lambda: from_frame(frame)):
        with pytest.raises(ValueError, match=words):
            read()


def test_files_that_cannot_be_read(tmp_path):
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64)).astype(np.uint8))
    picture.save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes()[:900])
    picture.save(tmp_path / "c.gif", save_all=True, append_images=[picture.rotate(90)])
    for name, words in [
        ("b.png", "row 0 is an image that cannot be read"),
        ("c.gif", "row 0 must be one of the frames"),
    ]:
        with Image.open(tmp_path / name) as image, pytest.raises(ValueError, match=words):
            from_arrays([([image], [0])])
    missing = np.ma.masked_greater(np.arange(6.0).reshape(2, 3), 4)
    with pytest.raises(ValueError, match="a masked array has missing values"):
        from_arrays([(missing, [0, 1])])


def test_maps_beside_images_with_channels_first():
    rng = np.random.default_rng(0)
    x, y = rng.random((4, 3, 9, 8), np.float32), rng.integers(0, 5, (4, 1, 9, 8))
    mask = Image.fromarray(y[0, 0].astype(np.uint8)).convert("P")
    rows = [{"image": x[i], "label": y[i], "w": 0.5 + i, "mask": mask} for i in range(4)]
    examples = from_torch([rows]).examples
    np.testing.assert_array_equal(examples["x"][0], x.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(examples["y"][0], y.transpose(0, 2, 3, 1))
    assert examples["w"].tolist() == [[0.5, 1.5, 2.5, 3.5]] and examples["w"].dtype == np.float32
    np.testing.assert_array_equal(examples["mask"][0], np.stack([np.asarray(mask)] * 4))
    for odd, words in [
        ({"w": [1.0]}, "its arrays must have one length, got .1, 4."),
        ({"w": [None] * 4}, "4 missing values"),
        ({"w": "abcd"}, "numbers"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_arrays([{"x": x, "y": y} | odd])
    with pytest.raises(ValueError, match=r"client 1: its arrays are \['x', 'y'\], those of client 0 \['x', 'y', 'w'\]"):
        from_arrays([{"x": x, "y": y, "w": np.ones(4)}, {"x": x, "y": y}])
    with pytest.raises(
        ValueError, match=r"row 0 must be labels, as an image of one of the modes 1, .* got .an image of mode 'RGB'"
    ):
        from_arrays([(x, [Image.new("RGB", (8, 9))] * 4)])


def test_images_of_hugging_face():
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    rng = np.random.default_rng(0)
    pictures = [an_image(rng, mode) for mode in ("P", "L", "RGB", "1")]
    plain = plain_pictures([image.convert("RGB") for image in pictures])
    first = rng.integers(0, 256, (4, 3, 9, 8)).astype(np.uint8)
    masks = rng.integers(0, 5, (4, 9, 8)).astype(np.uint8)
    kinds = {"image": datasets.Image(), "first": datasets.Array3D((3, 9, 8), "uint8"), "w": datasets.Value("float32")}
    kinds |= {"mask": datasets.Array2D((9, 8), "uint8"), "label": datasets.Value("uint8")}
    columns = {"image": pictures, "first": first, "mask": masks, "label": [0, 1, 2, 3], "w": [0.5, 1, 2, 3]}
    made = datasets.Dataset.from_dict(columns, datasets.Features(kinds))
    for table in (made, made.to_iterable_dataset()):
        data = from_huggingface(table, x="image", extra=["w"])
        np.testing.assert_allclose(data.train["x"], plain, rtol=1e-6)
        assert data.train["w"].tolist() == [0.5, 1, 2, 3] and data.train["y"].tolist() == [0, 1, 2, 3]
        data = from_huggingface(table, x="first", y="mask", extra="w")
        np.testing.assert_allclose(data.train["x"], first.transpose(0, 2, 3, 1) / 255, rtol=1e-6)
        np.testing.assert_array_equal(data.train["y"], masks)


def test_tensors_of_torch():
    torch = pytest.importorskip("torch", reason="PyTorch is not needed, and not installed by the tests")
    x = torch.rand(4, 3, 9, 8, requires_grad=True)
    for kind in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        rows = torch.utils.data.TensorDataset(x.to(kind), torch.arange(4))
        found = from_torch([rows]).examples["x"][0]
        np.testing.assert_array_equal(found, x.to(kind).detach().float().numpy().transpose(0, 2, 3, 1))
    grey = torch.randint(0, 256, (4, 1, 9, 8), dtype=torch.uint8)
    found = from_arrays([(grey, torch.arange(4))]).examples["x"][0]
    np.testing.assert_allclose(found, grey.numpy().transpose(0, 2, 3, 1) / 255, rtol=1e-6)
    with pytest.raises(ValueError, match=r"images of unknown white, int32 of shape \[9, 8, 1\] an example"):
        from_torch([torch.utils.data.TensorDataset(grey.int(), torch.arange(4))])


def test_arrays_beside_images_move_their_channels_only_in_the_plane_of_the_images():
    maps = np.arange(24.0).reshape(1, 2, 3, 4)
    moved = array_beside(maps, "w", moved=True, plane=(3, 4))
    np.testing.assert_array_equal(moved, maps.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(array_beside(maps, "w", moved=True, plane=(4, 4)), maps)
    np.testing.assert_array_equal(array_beside(maps, "w", plane=(3, 4)), maps)
    several = array_beside({"maps": maps, "one": pd.DataFrame({"a": [7]})}, "w", moved=True, plane=(3, 4))
    np.testing.assert_array_equal(several["maps"], moved)
    assert several["one"].tolist() == [7]
