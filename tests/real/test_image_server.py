"""A real server of a model that takes images: transformers' own, with a LLaVA of random weights."""

import json

import numpy as np
import pytest

from memrl_jax.models import tiny
from memrl_jax.rollout import policies
from memrl_jax.sampling import images, remote
from memrl_jax.types import Message
from tests.sampling.test_images import ROW, answered

torch = pytest.importorskip("torch", reason="the model is made with torch")
pytest.importorskip("PIL", reason="the model's processor reads images with pillow")
for _name in ("accelerate", "openai", "fastapi", "uvicorn"):
  pytest.importorskip(_name, reason=f"transformers serve needs {_name}: transformers[serving]")

from tests.real.test_remote_server import transformers_serve  # noqa: E402

TEMPLATE = (
  "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}{% for p in m['content'] %}"
  "{{ '<image>' if p['type'] == 'image' else p['text'] }}{% endfor %}{{ '<|im_end|>\\n' }}"
  "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SIDE, PATCH = 56, 14
GREY = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNoAAAAggCB2kUIOwAAAABJRU5ErkJggg=="


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
  import transformers

  place = tmp_path_factory.mktemp("served") / "llava-random"
  tokenizer = transformers.AutoTokenizer.from_pretrained(tiny.tokenizer_directory())
  tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
  torch.manual_seed(0)
  heads = {"num_hidden_layers": 2, "num_attention_heads": 2}
  config = transformers.LlavaConfig(
    vision_config=transformers.CLIPVisionConfig(
      hidden_size=32, intermediate_size=64, image_size=SIDE, patch_size=PATCH, **heads
    ),
    text_config=transformers.LlamaConfig(
      vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, **heads
    ),
    image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    vision_feature_layer=-1,
    image_seq_length=(SIDE // PATCH) ** 2,
  )
  transformers.LlavaForConditionalGeneration(config).save_pretrained(place)
  transformers.LlavaProcessor(
    image_processor=transformers.CLIPImageProcessor(
      size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    ),
    tokenizer=tokenizer,
    patch_size=PATCH,
    vision_feature_select_strategy="default",
    num_additional_image_tokens=1,
    chat_template=TEMPLATE,
  ).save_pretrained(place)
  (place / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
  with transformers_serve(place, place.parent / "serve.log") as url:
    yield url


def test_a_model_that_takes_images_is_known_by_its_token_count_and_sees_them(
  llava, tmp_path, caplog
):
  exam = tmp_path / "hle.jsonl"
  exam.write_text(json.dumps(ROW | {"image": GREY}) + "\n")
  with remote.Client(remote.RemoteConfig(url=llava, concurrency=1)) as client:

    def said(*pictures):
      messages = [Message("user", "(1,2) up", pictures)]
      return client.ask(remote.Ask(np.zeros(2, np.uint32), 12, messages=messages, temperature=0.0))

    assert len({said().text, said(GREY).text, said(images.PROBE).text}) == 3
    sampling = policies.SamplingConfig(play_tokens=4)
    made = answered(policies.RemotePolicy(client, None, sampling, 64), exam)
    assert made.void is None and made.turns[0].messages[0].images == (GREY,)
    assert client.counts.images_dropped == 0 and caplog.text == ""
