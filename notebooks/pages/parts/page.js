// What all pages share: a pen that draws in px, the position in the address, controls, keys, "copy SVG".
const $ = id => document.getElementById(id);

class Pen {
  constructor(width) { this.width = width; this.narrow = width < 520; this.marks = []; }
  box(x, y, width, height, fill, more = '') {
    this.marks.push(`<rect x="${x}" y="${y}" width="${Math.max(width, .5)}" height="${height}" fill="${fill}" ${more}/>`);
  }
  text(x, y, words, more = '') { this.marks.push(`<text x="${x}" y="${y}" ${more}>${words}</text>`); }
  path(d, more) { this.marks.push(`<path d="${d}" ${more}/>`); }
  line(x1, y1, x2, y2, more = '') { this.path(`M${x1},${y1} L${x2},${y2}`, `stroke="var(--ink)" fill="none" ${more}`); }
  arrow(x1, y1, x2, y2, colour) {
    const angle = Math.atan2(y2 - y1, x2 - x1), at = turn => [x2 - 11 * Math.cos(angle + turn), y2 - 11 * Math.sin(angle + turn)];
    const [a, b] = [at(.5), at(-.5)];
    this.path(`M${x1},${y1} L${(a[0] + b[0]) / 2},${(a[1] + b[1]) / 2}`, `stroke="${colour}" stroke-width="4"`);
    this.path(`M${x2},${y2} L${a} L${b} Z`, `fill="${colour}"`);
  }
}

// start: what stands in the address, each with a control of its name, but for `key`: where one is in moments(state).
// draw(pen, state): draws, and returns the height, the sentence below and the answer.
function lesson({start, key, moments, draw}) {
  const state = {...start}, controls = [...document.querySelectorAll('[name]')].filter(one => one.name in start);
  $('moves').innerHTML = `<button id=back>Back</button><button id=next>Next</button><button id=play>Play</button>
    <input type=range name=position min=0 aria-label="position"><button id=copy>Copy SVG</button>`;
  const position = document.querySelector('[name=position]');
  let playing = 0, saving = 0;
  const place = () => Math.max(0, moments(state).findLastIndex(value => value <= state[key]));
  const go = to => { const values = moments(state); state[key] = values[Math.max(0, Math.min(to, values.length - 1))]; show(); };
  const pause = () => { clearInterval(playing); playing = 0; $('play').textContent = 'Play'; };

  function read() {
    Object.assign(state, start);
    for (const [name, text] of new URLSearchParams(location.hash.slice(1)))
      if (name in start && text) state[name] = typeof start[name] == 'number' ? Number(text) || 0 : text;
    for (const control of controls) take(control, state[control.name]);
  }
  function take(control, value) {  // a value that a control does not have is that of the beginning
    control.value = value;
    if (control.value === '') control.value = start[control.name];
    state[control.name] = typeof start[control.name] == 'number' ? Number(control.value) : control.value;
  }
  function show() {
    state[key] = moments(state)[place()];
    position.max = moments(state).length - 1;
    position.value = place();
    const pen = new Pen($('figure').parentElement.clientWidth), {height, say, answer} = draw(pen, state);
    $('figure').setAttribute('viewBox', `0 0 ${pen.width} ${height}`);
    $('figure').setAttribute('width', pen.width);
    $('figure').setAttribute('height', height);
    $('figure').innerHTML = pen.marks.join('');
    $('say').textContent = say;
    $('answer').textContent = answer;
    clearTimeout(saving);
    saving = setTimeout(() => history.replaceState(null, '', '#' + new URLSearchParams(state)), 200);
  }
  async function copy() {
    const picture = $('figure').cloneNode(true), colours = getComputedStyle(document.documentElement);
    picture.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
    picture.insertAdjacentHTML('afterbegin', '<style>text{fill:var(--ink);font-size:13px;font-family:sans-serif}</style>');
    const text = picture.outerHTML.replace(/var\((--[\w-]+)\)/g, (_, name) => colours.getPropertyValue(name).trim());
    await navigator.clipboard.writeText(text);
    $('copy').textContent = 'Copied';
    setTimeout(() => $('copy').textContent = 'Copy SVG', 1500);
  }
  for (const control of controls) control.oninput = () => { take(control, control.value); show(); };
  position.oninput = () => go(Number(position.value));
  $('back').onclick = () => go(place() - 1);
  $('next').onclick = () => go(place() + 1);
  $('copy').onclick = copy;
  $('play').onclick = () => {
    if (playing) return pause();
    if (place() == moments(state).length - 1) go(0);
    $('play').textContent = 'Pause';
    playing = setInterval(() => place() == moments(state).length - 1 ? pause() : go(place() + 1), 800);
  };
  onkeydown = event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (step && !/INPUT|SELECT/.test(event.target.tagName)) go(place() + step);
  };
  onhashchange = () => { read(); show(); };
  onresize = show;
  read();
  show();
}
