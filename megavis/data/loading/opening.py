"""Open the shard folders that a config names, and check that the model can read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megavis.config.errors import UserError, blame, counted
from megavis.config.schema import RunConfig
from megavis.config.section import ConfigIssue
from megavis.data.codecs.codec import PaletteLike
from megavis.data.codecs.transforms import Transform, evaluation_transform, training_transform
from megavis.data.format.manifest import MANIFEST_NAME, Manifest
from megavis.data.loading.blended_dataset import BlendedDataset, Samples
from megavis.data.loading.dataset import ShardDataset, subset_per_class
from megavis.data.loading.labels import check_numbering
from megavis.data.loading.needs import data_needs
from megavis.parallel.limits import allowed_open_files


@dataclass(frozen=True)
class ShardOpener:
    """Opens the shard folders of a config for one model.

    Attributes:
        config: names the folders.
        palette: colours of palette shards, or for encoding images; None: the shards'.
        check: yields each reason why shards do not fit the model.
        needs_labels: whether every sample must have a class.
        classes_of: returns the names of the classes of shards that the model reads or predicts.
    """

    config: RunConfig
    palette: PaletteLike | None
    check: Callable[[Manifest], Iterable[str]]
    needs_labels: bool
    classes_of: Callable[[Manifest], tuple[str, ...]]

    def training_data(self) -> Samples:
        """Open the shard folder of `data.train`, or blend several.

        Raises:
            UserError: the model cannot read one; names the key.
        """
        data = self.config.data
        with blame("data.background_noise"):
            transform = training_transform(data, seed=self.config.seed)
        if not isinstance(data.train, str):
            parts = [self._source(place) for place in range(len(data.train))]
            self._check_cache(parts)
            with blame("data.train"):
                blend = BlendedDataset(parts, [source.weight for source in data.train])
            # Folders that fit one by one may have too many classes together.
            if complaints := [*self.check(blend.manifest)]:
                what = f"the blend of {len(parts)} folders"
                raise UserError.of(("data.train", f"{what} {text}") for text in complaints)
            return blend
        dataset = self.folder("data.train", data.train, transform)
        self._check_cache([dataset])
        if data.images_per_class is None:
            return dataset
        with blame("data.images_per_class"):
            return subset_per_class(dataset, data.images_per_class, seed=self.config.seed)

    def _check_cache(self, parts: Sequence[ShardDataset]) -> None:
        """Raise UserError if `data.cache_gib` has no room for the shards that are read at once."""
        needs = data_needs(
            self.config.data, [part.manifest for part in parts], allowed_open_files()
        )
        complaints = [issue for issue in needs.complaints() if issue[0] == "data.cache_gib"]
        if complaints:
            raise UserError.of(complaints)

    def held_out(self, key: str, path: str, train: Samples) -> ShardDataset:
        """Open images for evaluation, in shards of the tokenizer of the training data.

        Args:
            key: the config key that names the folder.

        Raises:
            UserError: the model cannot read them, or their tokenizer or the numbers of their
                classes differ; names the key.
        """
        dataset = self.folder(key, path, evaluation_transform(self.config.data))
        if dataset.manifest.identity != train.manifest.identity:
            kind = train.manifest.tokenizer_name
            text = f"{path} was made with another {kind} than {train.directory}"
            raise UserError(text, key=key)
        # Fine-tuning has a clearer message for images without classes.
        if found := self.classes_of(dataset.manifest):
            trained = self.classes_of(train.manifest)
            check_numbering(dataset.directory, found, trained, may_lack_last=True, key=key)
        return dataset

    def folder(
        self, key: str, path: str, transform: Transform, *, crop_key: str = "data.crop"
    ) -> ShardDataset:
        """Open a shard folder that `key` names; raise UserError if the model cannot read it.

        Args:
            crop_key: the key of the transform's crop.
        """
        with blame(key):
            try:
                dataset = ShardDataset(
                    path,
                    transform,
                    cache=self.config.data.cache,
                    cache_limit=self.config.data.cache_limit,
                    palette=self.palette,
                    window_shards=self.config.data.window_shards,
                )
            except UserError as error:
                unfit = []
                if self.palette is None and Path(path, MANIFEST_NAME).exists():
                    unfit = self._complaints(key, path, Manifest.read(path))
                if unfit:  # Shards of a wrong kind need no advice on their size.
                    raise UserError.of(unfit) from None
                if error.remedy is None:
                    raise
                remedy = replace(error.remedy, key=crop_key)
                raise UserError(error.fault, remedy=remedy) from None
        what = f"{path}, read with data.palette," if self.palette else path
        complaints = self._complaints(key, what, dataset.manifest)
        missing = dataset.num_unlabelled if self.needs_labels else 0
        if missing and not complaints:
            found = counted(missing, "sample")
            text = f"{path} holds {found} without a label, of {len(dataset)} in all"
            complaints.append((key, f"{text}, and this model has no embedding for them"))
        if complaints:
            raise UserError.of(complaints)
        return dataset

    def _complaints(self, key: str, what: str, manifest: Manifest) -> list[ConfigIssue]:
        return [(key, f"{what} {text}") for text in self.check(manifest)]

    def _source(self, place: int) -> ShardDataset:
        """Open one of several training folders, with its own crop if it has one."""
        data = self.config.data
        source, where = data.train_sources[place], f"data.train.{place}"
        transform = training_transform(data, seed=self.config.seed, crop=source.crop)
        crop_key = "data.crop" if source.crop is None else f"{where}.crop"
        return self.folder(f"{where}.path", source.path, transform, crop_key=crop_key)
