"""Backbones beyond their contract."""

import pytest
import torch

from lfc.backbones import MLP, ItemEmbedding
from lfc.errors import UserError


def test_an_item_has_a_vector_of_its_own():
    torch.manual_seed(0)
    backbone = ItemEmbedding(in_features=5000, size=8)
    features = backbone(torch.arange(5000))
    assert features.shape == (5000, 8) and backbone.out_features == 8 and ItemEmbedding(3).out_features == 16
    assert len(features.unique(dim=0)) == 5000
    assert features.std().item() == pytest.approx(0.1, rel=0.02) and abs(features.mean().item()) < 0.002
    backbone(torch.tensor([7, 2, 7])).sum().backward()
    moved = backbone.embedding.weight.grad
    assert moved[7].tolist() == [2] * 8 and moved[2].tolist() == [1] * 8 and moved.count_nonzero() == 16


def test_vectors_are_drawn_anew():
    torch.manual_seed(0)
    backbone = ItemEmbedding(in_features=5000)
    before = backbone.embedding.weight.detach().clone()
    backbone.restart()
    after = backbone.embedding.weight.detach()
    assert (before != after).any(-1).all() and after.std().item() == pytest.approx(0.1, rel=0.02)
    torch.manual_seed(0)
    assert torch.equal(ItemEmbedding(in_features=5000).embedding.weight, before)


@pytest.mark.parametrize("inputs", [torch.randn(4, 7), torch.randn(4), torch.zeros(4, 7).long(), torch.zeros(4).int()])
def test_item_embedding_reads_numbers_of_items(inputs):
    with pytest.raises(UserError, match=r"^ItemEmbedding reads ItemDataModule's item numbers; these inputs are torch."):
        ItemEmbedding(in_features=7)(inputs)


def test_item_embedding_knows_the_items_there_were():
    backbone = ItemEmbedding(in_features=7)
    for item in (7, -1):
        with pytest.raises(UserError, match=rf"knows 7 items and was given number {item}; give the data"):
            backbone(torch.tensor([item]))


def test_item_embeddings_that_cannot_be():
    with pytest.raises(UserError, match=r"take --data=ItemDataModule"):
        ItemEmbedding(in_features=None)
    with pytest.raises(UserError, match=r"--model.backbone.size=0: "):
        ItemEmbedding(in_features=7, size=0)


@pytest.mark.parametrize("options", [{}, {"hidden": []}, {"standardize": True}], ids=str)
def test_mlp_reads_vectors(options):
    with pytest.raises(UserError, match=r"MLP reads feature vectors and these inputs are torch.int64; take --data="):
        MLP(7, **options)(torch.arange(4))
