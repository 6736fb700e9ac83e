#!/usr/bin/env bash
# Check dist/: the metadata, the contents of wheel and sdist, and that the wheel works in a new
# environment. WHOLE=1 installs all dependencies (GBs) and trains on letters.
# Usage: check_wheel.sh PYTHON; PYTHON needs the packages build and twine.
set -euo pipefail
python=$1
folder=$(mktemp -d "${TMPDIR:-/tmp}/megavis-wheel-XXXXXX")
trap 'rm -rf "$folder"' EXIT
"$python" -m twine check --strict dist/*

wheel=$(echo dist/megavis-*.whl) sdist=$(echo dist/megavis-*.tar.gz)
"$python" -m zipfile --list "$wheel" >"$folder/wheel"
for file in megavis/reports/page.css megavis/reports/page.html.jinja \
  megavis/reports/published/igpt.yaml megavis/yaml_configs/compose/random_patches.yaml \
  megavis/yaml_configs/schema.json data_tools/__main__.py; do
  grep --quiet "$file" "$folder/wheel" || { echo "$wheel lacks $file" >&2; exit 1; }
done
tar --list --file "$sdist" >"$folder/sdist"
for file in yaml_configs/igpt/demo.yaml docs/architecture.md tests/conftest.py; do
  grep --quiet "$file" "$folder/sdist" || { echo "$sdist lacks $file" >&2; exit 1; }
done

"$python" -m venv "$folder/venv"
bin=$folder/venv/bin checkout=$PWD
if [ -n "${WHOLE:-}" ]; then
  "$bin/pip" install --quiet --constraint constraints.txt "$wheel"
else
  # The dependencies of commands that do not import torch.
  "$bin/pip" install --quiet --constraint constraints.txt numpy pydantic PyYAML
  "$bin/pip" install --quiet --no-deps "$wheel"
fi
# Leave the checkout, whose modules would shadow the wheel's.
cd "$folder"
"$bin/megavis" --version
"$bin/megavis" schema --out schema.json
cmp schema.json "$checkout/yaml_configs/schema.json"
"$bin/megavis" config show yaml_configs/compose/random_patches.yaml >/dev/null
"$bin/megavis" train --help >/dev/null
"$bin/megavis-data" --help >/dev/null
if [ -n "${WHOLE:-}" ]; then
  # The quick start of docs/getting-started.md at a small size.
  "$bin/megavis-data" letters letters --size 32 --images 640
  "$bin/megavis-data" jpeg letters/train --out letters/shards --size 32
  "$bin/megavis" train yaml_configs/compose/random_patches.yaml data.train=letters/shards \
    data.validation= training.steps=20 training.sample_every=20 model.num_layers=1 \
    training.sample_images=2 schedule.warmup_steps=0
  ls runs/compose_random_patches/samples/*.png
fi
echo "the wheel works"
