"""The lazy names of the packages are written out in stubs, for editors and type checkers, and each of them exists."""

from inspect import isclass

import exports
import pytest

import arimage
from arimage.families import FAMILIES, PIPELINES


@pytest.mark.parametrize("package", exports.PACKAGES, ids=lambda package: package.__name__)
def test_the_stub_is_that_of_the_families(package):
    assert exports.stub_file(package).read_text(encoding="utf-8") == exports.stub(package), "run `make exports`"


@pytest.mark.parametrize("package", exports.PACKAGES, ids=lambda package: package.__name__)
def test_every_name_exists(package):
    assert all(getattr(package, name) is not None for name in package.__all__)
    assert set(package.__all__) <= set(dir(package))


def test_a_star_import_has_them():
    names = {}
    exec("from arimage import *", names)
    assert set(arimage.__all__) <= names.keys()


@pytest.mark.parametrize("name", ["Nonesuch", "convert_nonesuch", "__nonesuch__"])
@pytest.mark.parametrize("package", exports.PACKAGES, ids=lambda package: package.__name__)
def test_other_names_are_attribute_errors(package, name):
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute '{name}'"):
        getattr(package, name)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_knows_its_family_and_its_components_are_exported(name):
    pipeline = getattr(arimage, name)
    assert name in pipeline.family.pipelines and pipeline.family in FAMILIES.values()
    kinds = [kind for kinds in pipeline._get_signature_types().values() for kind in kinds if isclass(kind)]
    for kind in kinds:
        if kind.__module__.startswith("arimage."):
            assert getattr(arimage, kind.__name__, None) is kind


def test_no_name_belongs_to_two_families():
    for attribute in ("pipelines", "exports", "instead"):
        names = [name for family in FAMILIES.values() for name in getattr(family, attribute)]
        assert len(names) == len(set(names))
    names = [converter.name for family in FAMILIES.values() for converter in family.converters]
    assert len(names) == len(set(names))
    for family in FAMILIES.values():
        own = {converter.name for converter in family.converters}
        assert {kind.converter for kind in family.model_types} <= own
        assert {checkpoint.family for checkpoint in family.checkpoints} <= {*own, ""}
