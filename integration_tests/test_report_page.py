"""The page of `megatron-train report` is complete in a browser and loads nothing else."""

import json
import math


def test_the_page_is_complete_in_a_browser(browser, run_command, tmp_path):
    records = [{"kind": "event", "event": "start", "iteration": 0, "commit": "abc"}]
    for step in range(1, 1201):
        record = {"kind": "train", "iteration": step, "lm loss": 6 * math.exp(-step / 600) + 2}
        record |= {"learning_rate": 1e-3 / step, "grad_norm": 1.0, "updated": True}
        records.append(record | {"seconds": 0.1, "tokens": 512, "consumed_samples": 4 * step})
        if step % 300 == 0:
            records.append({"kind": "validation", "iteration": step, "lm loss": 4 - step / 1000})
    records.append({"kind": "event", "event": "end", "iteration": 1200, "reason": "done"})
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "metrics.jsonl").write_text(lines)
    run_command(tmp_path, f"megatron-train report {tmp_path}")

    page, complaints, asked = browser.new_page(), [], []
    page.on("console", lambda said: complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda one: asked.append(one.url))
    page.goto((tmp_path / "report.html").as_uri())
    assert page.text_content("header p") == "Done after step 1200."
    assert page.locator("svg polyline.first").count() == 4
    assert page.locator("svg circle.second").count() == 4

    chart = page.locator("svg").first
    box = chart.bounding_box()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 0.5 * box["height"])
    tip = page.locator(".tip").first
    tip.wait_for(state="visible")
    assert "training, step 11" in tip.text_content() or "training, step 12" in tip.text_content()
    assert "validation, step 1200: 2.8" in tip.text_content()
    page.mouse.move(0, 0)
    tip.wait_for(state="hidden")
    widths = page.evaluate("[document.body.scrollWidth, window.innerWidth]")
    assert widths[0] <= widths[1]
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    page.screenshot(path=tmp_path / "report.png", full_page=True)
    assert complaints == []
    assert asked == [(tmp_path / "report.html").as_uri()]
    page.close()
