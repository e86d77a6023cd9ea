'use strict'
// Everything that comes from the cluster becomes a text node, never markup.

const every = 2000 // ms between two questions
const worst = 30000 // ms between two questions while there is no answer
const size = 50 // Services on a page

const byId = (id) => document.getElementById(id)
const asked = { q: '', node: '', wrong: false, offset: 0 }
let shown = { url: '', tag: '', data: null }
let failures = 0
let ahead = 0 // how many ms the server's clock is ahead of this one
let timer = 0
let asking = null

// make returns an element with attributes and children; texts become text nodes.
function make(name, attributes, ...children) {
  const element = document.createElement(name)
  for (const [key, value] of Object.entries(attributes ?? {})) {
    if (key === 'class') element.className = value
    else if (key === 'click') element.addEventListener('click', value)
    else if (value !== undefined && value !== false) element.setAttribute(key, value === true ? '' : value)
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== ''))
  return element
}

// fill replaces what is in an element, unless it was made of the same. The focus stays where it was.
function fill(id, of, children) {
  const element = byId(id)
  const key = JSON.stringify(of)
  if (element.landfall === key) return
  element.landfall = key
  const focused = element.contains(document.activeElement) ? document.activeElement.getAttribute('data-key') : null
  element.replaceChildren(...children())
  if (focused !== null) [...element.querySelectorAll('[data-key]')].find((e) => e.getAttribute('data-key') === focused)?.focus()
}

function text(id, value) {
  const element = byId(id)
  if (element.textContent !== value) element.textContent = value
}

const plural = (n, one, many) => `${n} ${n === 1 ? one : many}`

// ago is a time element that says how long ago something was.
function ago(time) {
  if (!time) return make('span', { class: 'soft' }, 'since an unknown time')
  const element = make('time', { datetime: time, title: new Date(time).toLocaleString() })
  tell(element)
  return element
}

function tell(element) {
  const seconds = Math.max(0, Math.round((Date.now() + ahead - Date.parse(element.dateTime)) / 1000))
  const [n, unit] = seconds < 60 ? [seconds, 's'] : seconds < 3600 ? [Math.floor(seconds / 60), 'min']
    : seconds < 172800 ? [Math.floor(seconds / 3600), 'h'] : [Math.floor(seconds / 86400), 'days']
  element.textContent = `for ${n} ${unit}`
}

function problemLine(p) {
  const name = p.namespace ? `${p.namespace}/${p.name}` : p.name
  return make('li', null, make('span', { class: 'name' }, `${p.kind} ${name}`), p.node ? ` on ${p.node}` : '', p.moreNodes ? ` and ${plural(p.moreNodes, 'more node', 'more nodes')}` : '', ' ',
    make('span', { class: 'bad' }, p.reason), ' ', ago(p.since), make('div', null, p.message))
}

function showProblems(o) {
  const reasons = Object.entries(o.reasons).sort((a, b) => b[1] - a[1])
  fill('reasons', [reasons, asked.q], () => reasons.map(([reason, n]) => make('li', null, make('button', {
    type: 'button', 'data-key': reason, 'aria-pressed': String(asked.q === reason),
    click: () => { byId('q').value = asked.q === reason ? '' : reason; search() },
  }, `${reason} ${n}`))))
  fill('problems', [o.problems, o.wrong], () => {
    if (o.wrong === 0) return [make('li', { class: 'none' }, 'Nothing is wrong.')]
    const more = o.wrong - o.problems.length
    return [...o.problems.map(problemLine), more > 0 ? make('li', null, `and ${more} more`) : ''].filter((e) => e !== '')
  })
}

function bar(u) {
  const parts = [['used', u.usedPart], ['kept', u.quarantinedPart], ['free', 1 - u.usedPart - u.quarantinedPart]]
  return make('div', null,
    make('div', { class: 'bar', 'aria-hidden': 'true' }, parts.map(([kind, part]) => {
      const span = make('span', { class: kind })
      span.style.flexGrow = String(Math.max(0, part))
      if (part > 0) span.style.minWidth = '2px'
      return span
    })),
    make('span', { class: 'figures' }, `${u.family}: ${u.used} used, ${u.quarantined} quarantined, ${u.free} free`))
}

function showPools(o) {
  fill('pools', o.pools, () => o.pools.length === 0
    ? [make('li', { class: 'soft' }, 'There is no IPAddressPool, so no Service gets an address.')]
    : o.pools.map((p) => make('li', null, make('span', { class: 'name' }, p.name),
      p.ready ? '' : make('span', { class: 'bad' }, ` ${p.reason}`), p.families.map(bar))))
}

function choose(node) {
  asked.node = asked.node === node ? '' : node
  asked.offset = 0
  ask()
}

function showNodes(o) {
  text('nodes-note', o.unnamed > 0
    ? `${plural(o.unnamed, 'address is', 'addresses are')} announced from more nodes than a Service names; the counts of routes lack these nodes.`
    : 'Choose a node to see the addresses that it announces.')
  fill('nodes', [o.nodes, asked.node], () => o.nodes.map((n) => {
    const state = n.leaving || (n.cordoned ? 'cordoned' : '')
    return make('li', null, make('button', {
      type: 'button', class: n.leaving ? 'leaving' : '', 'data-key': n.name, 'aria-pressed': String(asked.node === n.name),
      click: () => choose(n.name),
    }, make('b', null, n.name), make('small', null, `${plural(n.owned, 'address', 'addresses')}, ${plural(n.routed, 'route', 'routes')}`),
    n.sessions > 0 ? make('small', { class: n.up < n.sessions ? 'bad' : '' }, `${n.up} of ${n.sessions} sessions up`) : '',
    n.findings > 0 ? make('small', { class: 'bad' }, plural(n.findings, 'finding', 'findings')) : '',
    state ? make('small', { class: 'bad' }, state) : ''))
  }))
}

function showPeers(o) {
  byId('peers-section').hidden = o.peers.length === 0
  fill('peers', o.peers, () => o.peers.map((p) => make('li', null, make('span', { class: 'name' }, p.name), ' ',
    make('span', { class: 'figures' }, [p.at, p.asn ? `AS ${p.asn}` : '', p.bfd ? 'BFD' : ''].filter(Boolean).join(', ')), ' ',
    make('span', { class: p.up < p.total || p.total === 0 ? 'bad' : 'good' }, `${p.up} of ${p.total} up`),
    make('table', null, make('tbody', null, p.sessions.map((s) => make('tr', null, make('td', { 'data-label': 'Node' }, s.node),
      make('td', { 'data-label': 'State' }, make('span', { class: s.reason ? 'bad' : 'good' }, s.state), s.reason ? ` ${s.reason}` : '', ' ',
        s.since ? ago(s.since) : ''), make('td', { 'data-label': 'Says' }, s.message ?? ''))))),
    p.total > p.sessions.length ? make('span', { class: 'soft' }, `and ${p.total - p.sessions.length} more`) : '')))
}

// announcers says which nodes announce an address, and how.
function announcers(a) {
  if (a.mode) return `ipMode ${a.mode}: nodes do not announce it`
  const all = []
  let others = a.otherNodes ?? 0
  if (a.owner) all.push(`${a.owner} (${a.protocol}${a.interfaces?.length ? ' on ' + a.interfaces.join(', ') : ''})`)
  for (const r of a.routes ?? []) {
    if (!r.nodes?.length) { others += r.otherNodes ?? 0; continue }
    const more = r.otherNodes ? ` and ${r.otherNodes} more` : ''
    all.push(`${r.nodes.join(', ')}${more} (BGP to ${(r.peers ?? []).join(', ')})`)
  }
  if (others > 0) all.push(`${plural(others, 'more node', 'more nodes')} (BGP)`)
  return all.join('; ') || 'no node'
}

function serviceRow(s) {
  const addresses = s.addresses ?? []
  const state = s.problem
    ? [make('span', { class: 'bad' }, s.problem.reason), ' ', ago(s.problem.since), make('div', null, s.problem.message)]
    : [make('span', { class: 'good' }, addresses.length === 0 ? 'no address' : 'announced')]
  return make('tr', null,
    make('td', { 'data-label': 'Service' }, make('span', { class: 'name' }, `${s.namespace}/${s.name}`), s.policy === 'Local' ? ' (Local)' : ''),
    make('td', { 'data-label': 'Address' }, addresses.length === 0 ? '–' : addresses.map((a) => make('div', null, a.vip,
      a.pool ? make('span', { class: 'figures' }, ` ${a.pool}`) : ''))),
    make('td', { 'data-label': 'Announced by' }, addresses.length === 0 ? '–' : addresses.map((a) => make('div', null, announcers(a)))),
    make('td', { 'data-label': 'State' }, state))
}

function showServices(page) {
  fill('services', page, () => page.rows.length === 0
    ? [make('tr', null, make('td', { colspan: '4' }, asked.q || asked.node || asked.wrong ? 'No Service fits.' : 'There is no Service of type LoadBalancer.'))]
    : page.rows.map(serviceRow))
  asked.offset = page.offset
  text('range', page.total === 0 ? '0 Services' : `${page.offset + 1} to ${page.offset + page.rows.length} of ${page.total}`)
  byId('earlier').disabled = page.offset === 0
  byId('later').disabled = page.offset + page.rows.length >= page.total
  byId('no-node').hidden = asked.node === ''
  text('no-node', `on ${asked.node}: show all nodes`)
}

function show(data) {
  const o = data.overview
  text('summary', `${plural(o.services, 'Service', 'Services')}, ${plural(o.addresses, 'address', 'addresses')}, ` +
    `${plural(o.nodes.length, 'node', 'nodes')}, ${o.wrong === 0 ? 'nothing wrong' : plural(o.wrong, 'problem', 'problems')}`)
  showProblems(o)
  showPools(o)
  showNodes(o)
  showPeers(o)
  showServices(data.page)
}

function live(message, lost) {
  text('live', message)
  byId('live').classList.toggle('lost', lost)
}

function address() {
  const query = new URLSearchParams({ limit: String(size) })
  if (asked.q) query.set('q', asked.q)
  if (asked.node) query.set('node', asked.node)
  if (asked.wrong) query.set('wrong', 'true')
  if (asked.offset) query.set('offset', String(asked.offset))
  return `data?${query}`
}

// ask asks for what has changed, shows it, and asks again after a while.
async function ask() {
  clearTimeout(timer)
  asking?.abort()
  const mine = asking = new AbortController()
  const limit = setTimeout(() => mine.abort(), 20000)
  const url = address()
  try {
    const headers = url === shown.url ? { 'If-None-Match': shown.tag } : {}
    const response = await fetch(url, { headers, cache: 'no-store', credentials: 'same-origin', signal: mine.signal })
    if (response.status === 200) {
      const data = await response.json()
      if (asking !== mine) return
      shown = { url, tag: response.headers.get('ETag') ?? '', data }
    } else if (response.status !== 304) {
      throw new Error(`the answer is ${response.status}: ${(await response.text()).trim().slice(0, 200)}`)
    }
    const date = Date.parse(response.headers.get('Date') ?? '')
    if (date) ahead = date - Date.now()
    failures = 0
    show(shown.data)
    const { by, leads, synced } = shown.data
    live(`live, from ${by}${leads ? ', which leads' : ''}${synced ? '' : '; it has not read everything yet'}`, false)
  } catch (error) {
    if (asking !== mine) return
    failures++
    live(`Not live: ${error.name === 'AbortError' ? 'no answer' : error.message}. Trying again.`, true)
  } finally {
    clearTimeout(limit)
    if (asking === mine) {
      asking = null
      const wait = failures === 0 ? every : Math.min(worst, every * 2 ** failures)
      if (!document.hidden) timer = setTimeout(ask, wait)
    }
  }
}

function search() {
  asked.q = byId('q').value.trim()
  asked.wrong = byId('wrong').checked
  asked.offset = 0
  clearTimeout(timer)
  timer = setTimeout(ask, 200)
}

byId('q').addEventListener('input', search)
byId('wrong').addEventListener('change', search)
byId('no-node').addEventListener('click', () => choose(asked.node))
byId('earlier').addEventListener('click', () => { asked.offset = Math.max(0, asked.offset - size); ask() })
byId('later').addEventListener('click', () => { asked.offset += size; ask() })
document.addEventListener('visibilitychange', () => { if (!document.hidden) ask() }) // a hidden page asks nothing
setInterval(() => document.querySelectorAll('time').forEach(tell), 10000)
ask()
