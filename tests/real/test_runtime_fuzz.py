"""Requests that schemathesis makes up from the service's own OpenAPI description: no 500, no leak."""

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra `runtime`")
pytest.importorskip("uvicorn", reason="the service needs the extra `runtime`")
pytest.importorskip("schemathesis", reason="it comes with the extra `real`")

import schemathesis
from hypothesis import HealthCheck, given, settings

from memrl_jax.runtime.tenants import Keys
from tests.runtime.serving import Model, bearer, learn, listening, serving

schemathesis.serializer.alias("application/x-ndjson", "text/plain")
EXAMPLES = 15  # a route
SECRET = "the vault opens with 4711"


def test_made_up_requests_find_no_failure_and_no_other_tenant(tmp_path):
  keys = Keys(tmp_path)
  (_, a), (_, b) = keys.add("a"), keys.add("b")
  model, seen = Model(), {}
  with (
    listening(model.app) as upstream,
    serving(tmp_path, upstream=upstream, rate=1e6, burst=10**6) as http,
  ):
    learn(http, "put a clean apple in the fridge", SECRET, headers=bearer(a))
    url = str(http.base_url).rstrip("/")
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
      operation = found.ok()

      @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
      @given(case=operation.as_strategy())
      def fuzz(case):
        answer = case.call(base_url=url, headers=bearer(b))
        assert answer.status_code < 500, (case, answer.text)
        assert "4711" not in answer.text and str(tmp_path) not in answer.text
        if answer.status_code >= 400:
          assert answer.json()["error"]["message"]
        seen.setdefault(case.operation.path, set()).add(answer.status_code)

      fuzz()
    assert http.get("/memories", headers=bearer(a)).json()["total"] == 1
  assert len(seen) >= 14 and all(200 in seen[path] for path in ("/suggest", "/memories", "/stats"))
  assert "4711" not in str(model.asked)
