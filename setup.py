"""Installs memrl_jax, and the folder kernels/ under the import name memrl_kernels.

(`kernels` is the name of a package on PyPI that transformers imports, hence the other name.)
"""

import setuptools

setuptools.setup(
  name="memrl_jax",
  version="0.1.0",
  description="Language-model agents that explore, remember and learn from what they remember, in JAX",
  license="Apache-2.0",
  python_requires=">=3.11",
  packages=[
    *setuptools.find_packages(include=["memrl_jax*"]),
    "memrl_kernels",
    *(f"memrl_kernels.{name}" for name in setuptools.find_packages("kernels")),
  ],
  package_dir={"memrl_kernels": "kernels"},
  package_data={
    "memrl_jax": [
      "models/assets/**/*",
      "envs/panels/*.json",
      "runtime/page/*",
      "training/report.html",
    ]
  },
  install_requires=[
    "jax>=0.10.2,<0.11",
    "flax>=0.12.8,<0.13",
    "optax>=0.2.8,<0.3",
    "orbax-checkpoint>=0.12.8,<0.13",
    "transformers>=5.24,<6",
    "sentencepiece>=0.2.1",
    "chex>=0.1.92",
    "faiss-cpu>=1.15",
    "ml-collections>=1.1",
    "tensorboard>=2.21",
    "safetensors>=0.8",
    "httpx2>=2,<3",
    "absl-py>=2.5",
    "rich>=15",
    "matplotlib>=3.11",
    "jinja2>=3.1",
  ],
  extras_require={
    "test": [
      "pytest>=9.2",
      "ruff==0.17.6",
      "import-linter>=2.17",
      "nbformat>=5.11",
      "nbclient>=0.11",
      "ipykernel>=7.4",
      "gguf>=0.17",
      "qwix>=0.1.8,<0.2",
      "hypothesis>=6.170",
      "bm25s>=0.3.16",
      "rapidfuzz>=3.14",
      "fastapi>=0.165",
      "uvicorn>=0.54",
    ],
    # What `make test-real` compares with, or compiles for; weights come as packages of their own.
    "real": [
      "torch==2.13.0",
      "libtpu>=0.0.50",
      "openai>=3.57",
      "accelerate>=1.15",
      "fastapi>=0.165",
      "uvicorn",
      "sentence-transformers>=5",
      "schemathesis>=4.32",
    ],
    "runtime": ["fastapi>=0.165", "uvicorn>=0.54"],  # a memory as a service
    "scienceworld": ["scienceworld==1.2.3"],  # and Java; later versions order objects otherwise
    "minihack": [
      "nle==1.3.0",
      "minihack==1.0.2",
      "minigrid>=3",
      "setuptools<81",
    ],  # its pkg_resources
    "webshop": ["bm25s>=0.3.16", "rapidfuzz>=3.14"],
    # Exact: names inside are replaced. Its pages: pip install --no-deps miniwob==1.1.0
    "browser": ["browsergym-core==0.14.3", "browsergym-miniwob==0.14.3"],
    "alfworld": [  # g++, cmake and make build its planner; exact: internals are patched
      "alfworld==0.4.2",
      "textworld==1.7.0",
      "fast-downward-textworld==20.6.4",
    ],
    "lifelong": ["PyMySQL>=1.1"],  # and MariaDB or MySQL, for config.env.engine=mysql
    "parquet": ["pyarrow>=15"],  # for published files in that format
    "gguf": ["gguf>=0.17"],
    "qlora": ["qwix>=0.1.8,<0.2"],
    "cuda": ["jax[cuda13]>=0.10.2,<0.11"],
    "tpu": ["jax[tpu]>=0.10.2,<0.11"],
  },
)
