"use strict";
const say = (text) => { document.getElementById("message").textContent = text; };
document.getElementById("draw").addEventListener("submit", async (event) => {
  event.preventDefault();
  say("Drawing ...");
  try {
    const reply = await fetch("/v1/images/generations", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ prompt: document.getElementById("prompt").value }),
    });
    const doc = await reply.json();
    if (!reply.ok) { say(doc.error.message); return; }
    const picture = document.getElementById("picture");
    picture.src = "data:image/png;base64," + doc.data[0].b64_json;
    picture.alt = doc.data[0].revised_prompt || "picture";
    picture.hidden = false;
    document.getElementById("caption").textContent =
      doc.inference_time_s.toFixed(2) + " s, composition " + doc.composition.slice(0, 8);
    say("");
  } catch (error) { say("The server cannot be reached."); }
});
