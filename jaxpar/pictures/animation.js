// Without it, or with motion switched off, the page shows the whole step.
const root = document.querySelector(".jaxpar");
const [button, slider, clock] = root.querySelector(".controls").children;
const last = +slider.max, rest = 1.5;  // seconds a unit of time, and at the end
const panels = [...root.querySelectorAll("section")].map(node => ({
  ...JSON.parse(node.dataset.strategy), says: node.querySelector("output"),
  future: node.querySelector(".future"), now: node.querySelector(".now"),
  names: node.querySelectorAll(".row"),
}));
function draw(t) {
  slider.value = t;
  clock.textContent = "time " + t.toFixed(1);
  for (const p of panels) {
    const until = Math.min(t, p.end);
    let worked = 0;
    p.work.forEach((spans, device) => {
      worked += spans.reduce((sum, [a, b]) => sum + Math.max(0, Math.min(until, b) - a), 0);
      p.names[device].classList.toggle("busy", spans.some(([a, b]) => a <= t && t < b));
    });
    const share = until ? worked / (until * p.work.length) : 0;
    p.says.textContent = `busy ${Math.round(100 * share)}%` +
      (t >= p.end ? `, done at ${p.end.toFixed(1)}` : "");
    p.future.setAttribute("x", p.left + until * p.unit);
    p.future.setAttribute("width", (p.end - until) * p.unit);
    p.now.setAttribute("transform", `translate(${until * p.unit} 0)`);
  }
}
let time = last, before = null, playing = false;
function frame(now) {
  if (!playing) return;
  if (before !== null) time += (now - before) / 1000;
  if (time > last + rest) time = 0;
  before = now;
  draw(Math.min(time, last));
  requestAnimationFrame(frame);
}
function play(on) {
  playing = on;
  before = null;
  button.textContent = on ? "pause" : "play";
  if (on) requestAnimationFrame(frame);
}
button.onclick = () => play(!playing);
slider.oninput = () => { play(false); time = +slider.value; draw(time); };
const asked = /t=([0-9.]+)/.exec(location.hash);
const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
time = asked ? Math.min(+asked[1], last) : still ? last : 0;
draw(time);
play(!asked && !still);
