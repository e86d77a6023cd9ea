// The site in a real browser: CHROMIUM, or chromium in the PATH. ./build has to have run.
import assert from 'node:assert/strict'
import { createReadStream, existsSync, mkdirSync, statSync } from 'node:fs'
import { createServer } from 'node:http'
import path from 'node:path'
import { after, before, test } from 'node:test'
import puppeteer from 'puppeteer-core'

const root = path.join(process.env.LANDFALL_REPOSITORY, 'bin/site')
const pictures = path.join(process.env.LANDFALL_REPOSITORY, 'bin/site-pictures')
const types = { '.html': 'text/html', '.js': 'text/javascript', '.css': 'text/css', '.svg': 'image/svg+xml', '.json': 'application/json' }

let server, browser, origin
const elsewhere = [], broken = [], pages = new Map()

before(async () => {
  mkdirSync(pictures, { recursive: true })
  server = createServer((request, response) => {
    let file = path.join(root, decodeURIComponent(new URL(request.url, 'http://site').pathname))
    if (existsSync(file) && statSync(file).isDirectory()) file = path.join(file, 'index.html')
    if (!file.startsWith(root) || !existsSync(file)) {
      response.writeHead(404).end()
      return
    }
    response.writeHead(200, { 'Content-Type': types[path.extname(file)] ?? 'application/octet-stream' })
    createReadStream(file).pipe(response)
  })
  await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
  origin = `http://127.0.0.1:${server.address().port}`
  browser = await puppeteer.launch({
    executablePath: process.env.CHROMIUM || '/usr/bin/chromium', args: ['--no-sandbox', '--disable-dev-shm-usage'],
    protocolTimeout: 300_000,
  })
})

after(async () => {
  await browser?.close()
  server?.close()
})

async function open(url, width = 1280) {
  const page = await browser.newPage()
  page.setDefaultTimeout(120_000)
  await page.setViewport({ width, height: 900 })
  page.on('request', (request) => {
    if (!request.url().startsWith(origin) && !request.url().startsWith('data:')) elsewhere.push(request.url())
  })
  page.on('response', (response) => response.status() >= 400 && broken.push(response.url()))
  page.on('pageerror', (error) => broken.push(String(error)))
  await page.goto(origin + url, { waitUntil: 'networkidle0' })
  return page
}

test('every link leads to a page with the fragment, and no page is wider than a telephone', async () => {
  const page = await open('/', 360)
  const wanted = ['/'], wide = []
  for (const url of wanted) {
    await page.goto(origin + url, { waitUntil: 'load' })
    const seen = await page.evaluate(() => ({
      links: [...document.querySelectorAll('a[href]')].map((a) => a.href),
      ids: [...document.querySelectorAll('[id]')].map((e) => e.id),
      width: document.documentElement.scrollWidth,
      text: document.querySelector('.vp-doc')?.innerText.length ?? 0,
    }))
    pages.set(url, seen)
    if (seen.width > 360) wide.push(`${url}: ${seen.width}`)
    for (const link of seen.links) {
      const to = new URL(link)
      if (to.origin === origin && !wanted.includes(to.pathname)) wanted.push(to.pathname)
    }
  }
  assert.ok(pages.size > 35, `found ${pages.size} pages`)
  const lost = []
  for (const [url, { links, text }] of pages) {
    if (text < 100) lost.push(`${url} is empty`)
    for (const link of links) {
      const to = new URL(link)
      if (to.origin !== origin || !to.hash) continue
      if (!pages.get(to.pathname)?.ids.includes(decodeURIComponent(to.hash.slice(1)))) lost.push(`${url} links ${link}`)
    }
  }
  assert.deepEqual(lost, [])
  assert.deepEqual(wide, [])
  await page.goto(origin + '/docs/guide/install.html', { waitUntil: 'networkidle0' })
  await page.screenshot({ path: path.join(pictures, 'narrow.png') })
})

test('search finds a page', async () => {
  const page = await open('/')
  await page.click('.DocSearch-Button')
  await page.waitForSelector('.search-input')
  await page.type('.search-input', 'NoLocalBackends')
  await page.waitForSelector('.results .result')
  const found = await page.$$eval('.results .result', (all) => all.map((a) => a.getAttribute('href') ?? a.href))
  assert.ok(found.some((href) => href.includes('/docs/reference/reasons')), found.join(' '))
  await page.screenshot({ path: path.join(pictures, 'search.png') })
})

test('a reader who wants a dark page gets one', async () => {
  const page = await browser.newPage()
  await page.emulateMediaFeatures([{ name: 'prefers-color-scheme', value: 'dark' }])
  await page.setViewport({ width: 1280, height: 900 })
  await page.goto(origin + '/docs/guide/l2.html', { waitUntil: 'networkidle0' })
  const color = await page.evaluate(() => getComputedStyle(document.body).backgroundColor)
  const light = color.match(/\d+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0)
  assert.ok(light < 200, color)
  await page.screenshot({ path: path.join(pictures, 'dark.png') })
})

test('nothing comes from another host, and nothing fails', () => {
  assert.deepEqual(elsewhere, [])
  assert.deepEqual(broken, [])
})
