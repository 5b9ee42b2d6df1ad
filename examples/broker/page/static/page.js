'use strict';

// The part of the address behind # says what is shown: #live/TOPIC/PARTITION/PRODUCER
// or #lesson/STEP,STEP. So everything can be bookmarked, links need no code, and
// the browser's Back is an undo.

const $ = id => document.getElementById(id);
const count = n => n.toLocaleString('en');
const SVG = 'http://www.w3.org/2000/svg';

// make returns a new element with children, which may be text.
function make(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  e.append(...children);
  return e;
}

// setText changes the text of an element only if it is another one, which keeps a
// reader's selection and does not stir a screen reader.
function setText(e, text) {
  if (e.textContent !== String(text)) e.textContent = text;
}

function setCurrent(e, on) {
  if (on) e.setAttribute('aria-current', 'true');
  else e.removeAttribute('aria-current');
}

// keep makes the children of parent those of items, in that order. A child stays
// the same element while its key does, and so keeps the focus.
function keep(parent, items, keyOf, create, update = () => {}) {
  const old = new Map([...parent.children].map(e => [e.dataset.key, e]));
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = String(keyOf(item));
    let e = old.get(key);
    old.delete(key);
    if (!e) {
      e = create(item);
      e.dataset.key = key;
    }
    if (e === place) place = place.nextElementSibling;
    else parent.insertBefore(e, place);
    update(e, item);
  }
  for (const e of old.values()) e.remove();
}

function range(first, last) {
  return first === last ? String(first) : `${first} to ${last}`;
}

function batchText(b) {
  return `epoch ${b.epoch}, ${b.first === b.last ? 'sequence' : 'sequences'} ${range(b.first, b.last)}`;
}

// ---- The ring ----

const SLOTS = 5;

// A Ring shows a window twice: as a drawing, and as a table for those who read.
class Ring {
  constructor(parent) {
    this.slots = []; // which batch is where, or null
    this.svg = document.createElementNS(SVG, 'svg');
    this.svg.setAttribute('class', 'ring');
    this.svg.setAttribute('viewBox', '-60 -60 120 120');
    this.svg.setAttribute('aria-hidden', 'true');
    this.arcs = [];
    this.labels = [];
    for (let i = 0; i < SLOTS; i++) {
      const angle = k => (k / SLOTS) * 2 * Math.PI - Math.PI / 2;
      const at = (a, r) => `${(r * Math.cos(a)).toFixed(2)} ${(r * Math.sin(a)).toFixed(2)}`;
      const gap = 0.04;
      this.arcs.push(this.draw('path', { d: `M${at(angle(i) + gap, 47)} A47 47 0 0 1 ${at(angle(i + 1) - gap, 47)}` }));
      const [x, y] = at(angle(i + 0.5), 47).split(' ');
      this.labels.push(this.draw('text', { x, y, class: 'slot' }));
      this.labels[i].textContent = i + 1;
    }
    this.draw('text', { y: -14, class: 'small' }).textContent = 'epoch';
    this.epoch = this.draw('text', { y: 12, class: 'big' });
    this.next = this.draw('text', { y: 27, class: 'small' });
    this.body = make('tbody');
    this.facts = make('dl', { class: 'facts-list' });
    parent.append(
      make('div', { class: 'state' }, this.svg,
        make('table', { class: 'slots' },
          make('thead', {}, make('tr', {},
            ...['Slot', 'Sequences', 'Offset', ''].map(t => make(t ? 'th' : 'td', t ? { scope: 'col' } : {}, t)))),
          this.body)),
      this.facts);
    for (let i = 0; i < SLOTS; i++) {
      this.body.append(make('tr', {}, make('th', { scope: 'row' }, i + 1), make('td'), make('td'), make('td', { class: 'mark' })));
    }
  }

  draw(tag, attributes) {
    const e = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
    this.svg.append(e);
    return e;
  }

  // place puts each new batch into the slot after the newest, as the broker does,
  // and leaves the others where they are.
  place(batches) {
    const has = b => b && batches.some(w => w.base === b.base && w.first === b.first);
    let slots = Array.from({ length: SLOTS }, (_, i) => (has(this.slots[i]) ? this.slots[i] : null));
    if (slots.every(s => !s)) {
      this.slots = Array.from({ length: SLOTS }, (_, i) => batches[i] || null);
      return;
    }
    for (const b of batches) {
      if (slots.some(s => s && s.base === b.base)) continue;
      const newest = slots.reduce((best, s, i) => (s && (best < 0 || s.base > slots[best].base) ? i : best), -1);
      slots[(newest + 1) % SLOTS] = b;
    }
    this.slots = slots;
  }

  show(state, facts) {
    this.place(state.window);
    const full = state.window.length === SLOTS;
    const newest = state.window.at(-1);
    const oldest = state.window[0];
    this.epoch.textContent = state.known ? state.epoch : '–';
    this.next.textContent = state.known ? `next ${state.next}` : 'not known';
    this.slots.forEach((b, i) => {
      const isNewest = b !== null && b.base === newest.base;
      const leaves = full && b.base === oldest.base;
      this.arcs[i].setAttribute('class', b ? (isNewest ? 'newest' : 'full') : '');
      this.labels[i].setAttribute('class', isNewest ? 'slot newest' : 'slot');
      const row = this.body.children[i];
      row.className = isNewest ? 'newest' : '';
      const [, sequences, offset, mark] = row.children;
      sequences.className = offset.className = b ? '' : 'empty';
      setText(sequences, b ? range(b.first, b.last) : 'empty');
      setText(offset, b ? b.base : '');
      setText(mark, isNewest ? 'newest' : leaves ? 'leaves next' : '');
    });
    keep(this.facts, facts, f => f[0],
      f => make('div', {}, make('dt', {}, f[0]), make('dd')),
      (e, f) => setText(e.lastChild, f[1]));
  }
}

// ---- The broker ----

let events = null; // the open EventSource
let chosen = { topic: '', partition: '', producer: '' };
let liveRing = null;
let listed = { key: '', count: -1, next: null, at: 0 };

function liveAddress(topic, partition, producer) {
  return '#' + ['live', topic, partition, producer].filter(x => x !== undefined).map(encodeURIComponent).join('/');
}

function listen() {
  stopListening();
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(chosen)) if (value !== '') query.set(name, value);
  events = new EventSource('/events?' + query);
  events.onmessage = m => {
    $('status').className = 'status on';
    setText($('status'), 'live');
    showLive(JSON.parse(m.data));
  };
  events.onerror = () => {
    $('status').className = 'status';
    // A browser that was refused gives up.
    if (events && events.readyState === EventSource.CLOSED) {
      setText($('status'), 'not served now; trying again');
      stopListening();
      setTimeout(() => { if (!events && !$('live').hidden && !document.hidden) listen(); }, 5000);
    } else {
      setText($('status'), 'connection lost; trying again');
    }
  };
}

function stopListening() {
  if (events) events.close();
  events = null;
}

const columns = [
  ['End offset', p => p.end],
  ['Last stable offset', p => p.stable],
  ['Open transactions', p => p.openTxns],
  ['Producers', p => p.producers],
  ['In flight', p => p.inFlight],
  ['Accepted', p => p.accepted],
  ['Duplicates', p => p.duplicates],
  ['Refused', p => p.refused],
];

function showLive(m) {
  keep($('partitions').tBodies[0], m.partitions, p => `${p.topic}/${p.partition}`,
    p => make('tr', {},
      make('th', { scope: 'row' }, make('a', { href: liveAddress(p.topic, p.partition) }, `${p.topic}-${p.partition}`)),
      ...columns.map(([label]) => make('td', { 'data-label': label }))),
    (e, p) => {
      setCurrent(e, p.topic === chosen.topic && String(p.partition) === chosen.partition);
      e.classList.toggle('offline', Boolean(p.offline));
      columns.forEach(([, get], i) => setText(e.children[i + 1], count(get(p))));
    });
  $('partitions').hidden = m.partitions.length === 0;
  $('no-partitions').hidden = m.partitions.length > 0;
  $('more-partitions').hidden = m.more === 0;
  setText($('more-partitions'), `${count(m.more)} more partitions are not shown. Those after the first 200 can be reached by the address ` +
    'of this page, with #live/TOPIC/PARTITION.');
  showSelected(m.selected);
}

function showSelected(s) {
  $('partition').hidden = $('last').hidden = !s;
  $('producer').hidden = !s || chosen.producer === '';
  if (!s) return;
  setText($('partition-title'), `Partition ${chosen.topic}-${chosen.partition}`);
  $('offline').hidden = Boolean(s.row) && !s.row.offline;
  setText($('offline'), s.row ? `Offline: ${s.row.offline}` : 'There is no such partition.');
  if (s.row) listProducers(s.row.producers);

  if (chosen.producer !== '') {
    setText($('producer-title'), `Producer ${chosen.producer}`);
    $('not-known').hidden = Boolean(s.producer);
    $('producer-state').hidden = !s.producer;
    if (s.producer) {
      const p = s.producer;
      if (!liveRing) liveRing = new Ring($('producer-state'));
      liveRing.show({ ...p, known: true }, [
        ['in flight', p.inFlight === 1 ? '1 batch' : `${p.inFlight} batches`],
        ['transaction', p.txn < 0 ? 'none open' : `open since offset ${p.txn}`],
        ['last active', p.active ? new Date(p.active).toLocaleTimeString() : 'not counted yet'],
      ]);
    }
  }
  $('no-answers').hidden = s.answers.length > 0;
  keep($('answers'), s.answers, a => a.number, answerItem);
}

function answerItem(a) {
  const who = chosen.producer === '' && a.batch.producer !== '-1' ?
    [make('a', { href: liveAddress(chosen.topic, chosen.partition, a.batch.producer) }, `producer ${a.batch.producer}`), ', '] : [];
  const at = new Date(a.at);
  return make('li', {},
    make('span', {}, make('span', { class: `tag ${a.kind}` }, a.label)),
    make('span', { class: 'batch' }, ...who, batchText(a.batch)),
    make('time', { datetime: a.at }, at.toLocaleTimeString()),
    make('span', { class: 'facts' }, a.words, a.code ? ` Answered with ${a.code} ${a.name}.` : ''));
}

// listProducers lists the first producers of the partition, again when their
// number has changed, but not all the time.
async function listProducers(n) {
  const key = `${chosen.topic}/${chosen.partition}`;
  if (listed.key === key && (listed.count === n || Date.now() - listed.at < 3000)) return;
  if (listed.key !== key) $('producers').replaceChildren();
  listed = { key, count: n, next: null, at: Date.now() };
  await moreProducers();
}

async function moreProducers() {
  const { key, next } = listed;
  const query = new URLSearchParams({ topic: chosen.topic, partition: chosen.partition, limit: 50 });
  if (next !== null) query.set('after', next);
  const response = await fetch('/debug/producers?' + query).catch(() => null);
  if (!response || !response.ok || listed.key !== key) {
    if (listed.key === key) listed.count = -1; // try again
    return;
  }
  // Ids can be larger than the numbers of JavaScript.
  const page = JSON.parse((await response.text()).replace(/"(ProducerID|Next)":(\d+)/g, '"$1":"$2"'));
  if (listed.key !== key) return;
  listed.next = page.Next ?? null;
  $('more-producers').hidden = listed.next === null;
  const ids = page.Producers.map(p => p.ProducerID);
  const before = next === null ? [] : [...$('producers').children].map(e => e.dataset.key);
  keep($('producers'), [...before, ...ids], id => id,
    id => make('li', {}, make('a', { href: liveAddress(chosen.topic, chosen.partition, id) }, id)));
  markProducer();
}

function markProducer() {
  for (const e of $('producers').children) setCurrent(e.firstChild, e.dataset.key === chosen.producer);
}

$('more-producers').onclick = moreProducers;
$('find').onsubmit = e => {
  e.preventDefault();
  location.hash = liveAddress(chosen.topic, chosen.partition, $('find-id').value);
};

// ---- The lesson ----

let trace = [];
let lessonRing = null;
let shownSteps = [];
let canOld = false;
let maxSteps = 100;

function lessonSteps() {
  const [view, steps] = location.hash.slice(1).split('/');
  return view === 'lesson' && steps ? decodeURIComponent(steps).split(',') : [];
}

function goTo(steps) {
  location.hash = '#lesson' + (steps.length ? '/' + steps.join(',') : '');
}

async function showLesson() {
  const steps = lessonSteps();
  const response = await fetch('/lesson?' + new URLSearchParams({ steps: steps.join(',') })).catch(() => null);
  if (steps.join() !== lessonSteps().join()) return; // another step came meanwhile
  if (!response || !response.ok) {
    const why = response ? await response.text() : 'The broker does not answer.';
    $('shown').replaceChildren(make('p', { class: 'words bad' }, why));
    return;
  }
  const answer = await response.json();
  trace = answer.trace;
  maxSteps = answer.max;
  showSteps(answer.shown);
}

function showSteps(shown) {
  const last = shown.at(-1);
  const state = last ? last.state : { known: false, window: [], next: 0, inFlight: 0, end: 0, canOld: false };
  if (!lessonRing || shown.length < shownSteps.length) {
    // An undo: the ring is filled again from the beginning.
    $('lesson-state').replaceChildren();
    lessonRing = new Ring($('lesson-state'));
  }
  for (const s of shown) lessonRing.place(s.state.window);
  lessonRing.show(state, [
    ['end offset', state.end],
    ['in flight', state.inFlight === 1 ? '1 batch' : `${state.inFlight} batches`],
  ]);
  shownSteps = shown;
  canOld = state.canOld;
  $('shown').replaceChildren(...(last ? describe(last) : [make('p', { class: 'words' }, 'Nothing was sent yet.')]));
  $('no-steps').hidden = shown.length > 0;
  keep($('transcript'), shown.map((s, i) => ({ ...s, number: i + 1 })).reverse(), s => `${s.number} ${s.step}`, transcriptItem);
  showButtons(state);
}

// describe returns what the last step has shown: the answer, why, what changed.
function describe(s) {
  const facts = make('dl');
  const fact = (name, ...value) => facts.append(make('dt', {}, name), make('dd', {}, ...value));
  const a = s.answer;
  if (a) {
    fact('Answer', a.words + (a.code ? ` Code ${a.code}, ${a.name}.` : ''));
    if (s.rule) fact('Why', isNaN(s.rule.number) ? s.rule.text : `Rule ${s.rule.number}. ${s.rule.text}`);
  }
  if (s.words) fact('Note', s.words);
  fact('Changed', ...(s.changed.length ? s.changed.map(c => make('p', {}, c)) : ['Nothing.']));
  return [
    make('span', { class: `tag ${a ? a.kind : 'event'}` }, a ? a.label : 'No batch'),
    make('h3', {}, s.title),
    ...(a ? [make('p', { class: 'batch' }, `${batchText(a.batch)}; ${a.batch.count === 1 ? '1 record' : a.batch.count + ' records'}`)] : []),
    facts,
  ];
}

function transcriptItem(s) {
  const a = s.answer;
  return make('li', {},
    make('span', {}, make('span', { class: `tag ${a ? a.kind : 'event'}` }, a ? a.label : 'No batch')),
    make('span', { class: 'batch' }, a ? `${s.title}: ${batchText(a.batch)}` : s.title),
    make('span', { class: 'number' }, `step ${s.number}`),
    make('span', { class: 'facts' }, a ? a.words : s.words));
}

function showButtons(state) {
  const steps = lessonSteps();
  const full = steps.length >= maxSteps;
  const onTrace = steps.every((s, i) => s === trace[i]);
  const done = steps.length;
  $('trace').disabled = onTrace && done >= trace.length;
  setText($('trace'), !onTrace ? 'Start the trace' : done === 0 ? 'Send the first' :
    done < trace.length ? `Send batch ${done + 1} of ${trace.length}` : 'All were sent');
  $('undo').disabled = $('over').disabled = done === 0;
  for (const b of $('steps').children) {
    b.disabled = full || { 'old-epoch': !canOld, finish: state.inFlight === 0, same: !shownSteps.some(s => s.answer) }[b.dataset.step] === true;
  }
}

$('steps').onclick = e => {
  const button = e.target.closest('button');
  if (button) goTo([...lessonSteps(), button.dataset.step]);
};
$('trace').onclick = () => {
  const steps = lessonSteps();
  goTo(steps.every((s, i) => s === trace[i]) ? trace.slice(0, steps.length + 1) : trace.slice(0, 1));
};
$('undo').onclick = () => goTo(lessonSteps().slice(0, -1));
$('over').onclick = () => goTo([]);

// ---- Which view ----

function route() {
  const [view, topic = '', partition = '', producer = ''] = location.hash.slice(1).split('/').map(decodeURIComponent);
  const lesson = view === 'lesson';
  $('lesson').hidden = !lesson;
  $('live').hidden = lesson;
  setCurrent($('to-lesson'), lesson);
  setCurrent($('to-live'), !lesson);
  if (lesson) {
    stopListening();
    showLesson();
    return;
  }
  if (topic && !partition) {
    location.replace(liveAddress(topic, 0));
    return;
  }
  if (liveRing && (producer !== chosen.producer || partition !== chosen.partition || topic !== chosen.topic)) {
    $('producer-state').replaceChildren();
    liveRing = null;
  }
  if (topic !== chosen.topic || partition !== chosen.partition || producer !== chosen.producer) $('answers').replaceChildren();
  chosen = { topic, partition, producer };
  markProducer();
  if (!document.hidden) listen();
}

window.addEventListener('hashchange', route);
document.addEventListener('visibilitychange', () => {
  if ($('live').hidden) return;
  if (document.hidden) stopListening();
  else listen();
});
route();
