"""The detector against unmodified torchvision, whose sampler is replaced by a plain one."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import box_iou

from megavis.composition.instances import objects_of
from megavis.model.detection import LOSSES, Cascade, Detector, SeededSampler
from megavis.parallel.random import uniform

pytestmark = pytest.mark.once

WIDTH, CLASSES, SIDE, PATCH, SEED = 8, 3, 64, 8, 5
SAMPLE = torch.tensor([11])


class PlainSampler:
    """Chooses by sorting pairs of draw and place."""

    def __init__(self, count, fraction, purpose):
        self.count, self.fraction, self.purpose = count, fraction, purpose

    def __call__(self, labels):
        own = labels[0].tolist()
        draws = uniform(SAMPLE, len(own), seed=SEED, purpose=self.purpose)[0].tolist()
        chosen = []
        room = int(self.count * self.fraction)
        for wanted in (lambda label: label >= 1, lambda label: label == 0):
            places = sorted((draws[i], i) for i, label in enumerate(own) if wanted(label))[:room]
            shown = torch.zeros(len(own), dtype=torch.uint8)
            shown[[place for _, place in places]] = 1
            chosen.append([shown])
            room = self.count - len(places)
        return tuple(chosen)


def levels(seed=0):
    random = torch.Generator().manual_seed(seed)
    sides = (32, 16, 8, 4, 2)
    return [torch.randn(1, WIDTH, side, side, generator=random) for side in sides]


def objects():
    masks = torch.zeros(3, SIDE, SIDE, dtype=torch.uint8)
    masks[0, 4:30, 8:40], masks[1, 20:60, 20:50], masks[2, 50:58, 2:12] = 1, 1, 1
    masks[1, 20:30, 20:30] = 0
    boxes = torch.tensor([[8.0, 4, 40, 30], [20.0, 20, 50, 60], [2.0, 50, 12, 58]])
    return {"boxes": boxes, "labels": torch.tensor([1, 3, 2]), "masks": masks}


def detector(*, cascades=False, regions=512):
    torch.manual_seed(0)
    made = Detector(
        WIDTH, CLASSES, patch_size=PATCH, side=SIDE, cascades=cascades, regions=regions, seed=SEED
    )
    for parameter in made.parameters():
        # Large enough for scores that tell boxes apart.
        nn.init.normal_(parameter, std=0.2)
    return made


def torchvision_network(own, regions):
    """Return torchvision's Mask R-CNN with the same weights, on given levels."""
    given = {}

    class Backbone(nn.Module):
        out_channels = WIDTH

        def forward(self, _):
            return OrderedDict(given)

    heads = copy.deepcopy(own.heads)
    network = MaskRCNN(
        Backbone(),
        min_size=SIDE,
        max_size=SIDE,
        rpn_anchor_generator=AnchorGenerator(
            ((16,), (32,), (64,), (128,), (256,)), ((0.5, 1.0, 2.0),) * 5
        ),
        rpn_head=copy.deepcopy(own.proposals.head),
        rpn_post_nms_top_n_train=1000,
        box_roi_pool=heads.box_roi_pool,
        box_head=heads.box_head,
        box_predictor=heads.box_predictor,
        mask_roi_pool=heads.mask_roi_pool,
        mask_head=heads.mask_head,
        mask_predictor=heads.mask_predictor,
    )
    network.rpn.fg_bg_sampler = PlainSampler(256, 0.5, "anchors")
    network.roi_heads.fg_bg_sampler = PlainSampler(regions, 0.25, "proposals")
    return network, given


@pytest.mark.parametrize("regions", [512, 64])
def test_one_image_equals_torchvision(regions):
    own = detector(regions=regions)
    network, given = torchvision_network(own, regions)
    shown = levels()
    given.update({str(place): level for place, level in enumerate(shown)})
    image = torch.zeros(3, SIDE, SIDE)
    expected = network.train()([image], [objects()])
    found = own.losses(shown, objects(), SAMPLE)
    for name, loss in zip(LOSSES, found, strict=True):
        assert float(loss) == pytest.approx(float(expected[name]), rel=1e-6), name
    (expected,) = network.eval()([image])
    found = own.detections(shown)
    assert len(found["scores"]) == 100
    pasted = paste_masks_in_image(found["masks"], found["boxes"], (SIDE, SIDE))
    for name, value in {**found, "masks": pasted}.items():
        torch.testing.assert_close(value, expected[name])


def agnostic_stage(own):
    """Return a stage of a cascade as torchvision's, with equal boxes for all classes."""
    plain = copy.deepcopy(own)
    predictor = FastRCNNPredictor(4 * WIDTH, CLASSES + 1)
    predictor.cls_score = plain.box_predictor.cls_score
    with torch.no_grad():
        predictor.bbox_pred.weight.copy_(own.box_predictor.bbox_pred.weight.repeat(CLASSES + 1, 1))
        predictor.bbox_pred.bias.copy_(own.box_predictor.bbox_pred.bias.repeat(CLASSES + 1))
    plain.box_predictor = predictor
    return plain


def test_cascade_of_one_stage_equals_torchvision_heads():
    stage = detector(cascades=True).heads.stages[0]
    cascade, plain = Cascade([stage]), agnostic_stage(stage)
    for heads in (stage, plain):
        heads.fg_bg_sampler = PlainSampler(512, 0.25, "proposals")
    shown = {str(place): level for place, level in enumerate(levels())}
    random = torch.Generator().manual_seed(1)
    corners = torch.rand(200, 2, 2, generator=random).mul(SIDE).sort(dim=1).values.flatten(1)
    proposals, shapes = [corners], [(SIDE, SIDE)]
    _, expected = plain.train()(shown, list(proposals), shapes, [objects()])
    _, found = cascade.train()(shown, list(proposals), shapes, [objects()])
    assert {name: float(loss) for name, loss in found.items()} == pytest.approx(
        {name: float(loss) for name, loss in expected.items()}, rel=1e-6
    )
    (expected,), _ = plain.eval()(shown, proposals, shapes)
    (found,), _ = cascade.eval()(shown, proposals, shapes)
    assert len(expected["scores"]) > 20
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_stage_reads_the_boxes_that_the_one_before_found():
    """Boxes by the formula of "Rich feature hierarchies" (Girshick et al.), and mean scores."""
    own = detector(cascades=True)
    read, said = [], []
    for stage in own.heads.stages:
        stage.box_roi_pool.register_forward_hook(lambda _, given, __: read.append(given[1][0]))
        stage.box_predictor.register_forward_hook(lambda _, __, out: said.append(out))
    found = own.detections(levels())
    scales = [(10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0)]
    for before, (_, offsets), scale, after in zip(
        read, said, scales, [*read[1:], None], strict=True
    ):
        left, top, right, bottom = before.unbind(1)
        width, height = right - left, bottom - top
        dx, dy, dw, dh = (offsets[:, :4] / torch.tensor(scale)).unbind(1)
        x, y = left + width / 2 + dx * width, top + height / 2 + dy * height
        # torchvision limits growth to 1000 / 16.
        limit = torch.log(torch.tensor(1000.0 / 16))
        w, h = width * dw.clamp(max=limit).exp(), height * dh.clamp(max=limit).exp()
        corners = torch.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2], 1).clamp(0, SIDE)
        if after is not None:
            torch.testing.assert_close(after, corners)
    # What is found are boxes of the last stage.
    away = (found["boxes"][:, None] - corners).abs().amax(2)
    assert away.amin(1).max() < 1e-3
    mean = torch.stack([logits.softmax(1) for logits, _ in said]).mean(0)
    assert float(found["scores"][0]) == pytest.approx(float(mean[:, 1:].max()), rel=1e-5)


def test_each_stage_learns_the_objects_of_the_boxes_that_it_reads():
    """Losses of "Fast R-CNN" (Girshick, 2015), section 2.3, in torchvision's form."""
    own = detector(cascades=True, regions=64)
    read, said = [], []
    for stage in own.heads.stages:
        # Small offsets, so that boxes stay with their objects.
        nn.init.normal_(stage.box_predictor.bbox_pred.weight, std=0.02)
        stage.box_roi_pool.register_forward_hook(lambda _, given, __: read.append(given[1][0]))
        stage.box_predictor.register_forward_hook(lambda _, __, out: said.append(out))
    shown = objects()
    losses = dict(zip(LOSSES, own.losses(levels(), shown, SAMPLE), strict=True))
    scales = [(10.0, 10.0, 5.0, 5.0), (20.0, 20.0, 10.0, 10.0), (30.0, 30.0, 15.0, 15.0)]
    of_class, of_box = 0.0, 0.0
    for boxes, (logits, offsets), scale, least in zip(
        read, said, scales, (0.5, 0.6, 0.7), strict=True
    ):
        found = 0
        for box, row, offset in zip(boxes, logits.double(), offsets.double(), strict=True):
            overlap, place = box_iou(box[None], shown["boxes"])[0].max(0)
            label = int(shown["labels"][place]) if overlap >= least else 0
            of_class -= float(row.log_softmax(0)[label]) / len(boxes)
            if label == 0:
                continue
            found += 1
            (left, top, right, bottom), wanted = box.tolist(), shown["boxes"][place].tolist()
            width, height = right - left, bottom - top
            target = (
                (wanted[0] + wanted[2] - left - right) / 2 / width * scale[0],
                (wanted[1] + wanted[3] - top - bottom) / 2 / height * scale[1],
                math.log((wanted[2] - wanted[0]) / width) * scale[2],
                math.log((wanted[3] - wanted[1]) / height) * scale[3],
            )
            for guess, value in zip(offset[:4].tolist(), target, strict=True):
                error = abs(guess - value)
                of_box += (4.5 * error**2 if error < 1 / 9 else error - 1 / 18) / len(boxes)
        assert 0 < found < len(boxes)
    assert float(losses["loss_classifier"]) == pytest.approx(of_class, rel=1e-5)
    assert float(losses["loss_box_reg"]) == pytest.approx(of_box, rel=1e-4)


def test_features_get_the_mean_gradient_of_the_stages():
    own, pooled, read = detector(cascades=True, regions=64), [], []
    for stage in own.heads.stages:
        stage.box_roi_pool.register_forward_hook(lambda _, __, out: pooled.append(out))
        stage.box_head.register_forward_pre_hook(lambda _, given: read.append(given[0]))
    shown = [level.requires_grad_() for level in levels()]
    loss = own.losses(shown, objects(), SAMPLE).sum()
    for features, own_features in zip(pooled, read, strict=True):
        torch.testing.assert_close(own_features, features)
        whole, part = torch.autograd.grad(loss, [own_features, features], retain_graph=True)
        assert whole.abs().max() > 0
        torch.testing.assert_close(part, whole / 3)


@pytest.mark.parametrize("cascades", [False, True])
def test_every_weight_learns_even_from_an_image_without_objects(cascades):
    own = detector(cascades=cascades)
    nothing = objects_of(torch.zeros(4, dtype=torch.int64), torch.zeros(4, SIDE, SIDE // 8).byte())
    losses = own.losses(levels(), nothing, SAMPLE)
    assert losses.isfinite().all()
    assert losses.tolist()[1] == losses.tolist()[3] == losses.tolist()[4] == 0.0
    losses.sum().backward()
    assert all(parameter.grad is not None for parameter in own.parameters())
    assert all(parameter.grad.isfinite().all() for parameter in own.parameters())


@pytest.mark.parametrize("cascades", [False, True])
def test_boxes_stay_float32_with_weights_in_bf16(cascades):
    own = detector(cascades=cascades)
    exact = own.losses(levels(), objects(), SAMPLE)
    own.bfloat16()
    found = own.losses([level.bfloat16() for level in levels()], objects(), SAMPLE)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0.05)
    detections = own.detections([level.bfloat16() for level in levels()])
    assert detections["boxes"].dtype == torch.float32
    # Boxes in bf16 would be whole or half pixels from 32 on.
    assert (detections["boxes"] % 0.125 != 0).any()


def test_sampler_takes_a_share_by_draws_of_the_sample():
    sampler = SeededSampler(8, 0.25, seed=SEED, purpose="anchors")
    labels = torch.tensor([1, 1, 1, -1, *[0] * 20])
    chosen = {}
    for sample in (3, 4):
        sampler.sample = torch.tensor([sample])
        (positive,), (negative,) = sampler([labels])
        assert (int(positive.sum()), int(negative.sum())) == (2, 6)
        assert not (positive & (labels < 1)).any()
        assert not (negative & (labels != 0)).any()
        again = sampler([labels])
        assert torch.equal(again[1][0], negative)
        chosen[sample] = negative.tolist()
    assert chosen[3] != chosen[4]
    few = sampler([torch.tensor([1, 0, 0])])
    assert [int(part[0].sum()) for part in few] == [1, 2]


def test_objects_have_the_box_around_their_mask():
    masks = torch.zeros(3, 16, 16, dtype=torch.uint8)
    masks[0, 3:7, 2:13], masks[2, 15, 0] = 1, 1
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1])
    packed = (masks.unflatten(2, (2, 8)) * weights).sum(3).byte()
    found = objects_of(torch.tensor([5, 0, 2]), packed)
    assert found["boxes"].tolist() == [[2, 3, 13, 7], [0, 15, 1, 16]]
    assert found["labels"].tolist() == [5, 2]
    assert torch.equal(found["masks"], masks[[0, 2]])
