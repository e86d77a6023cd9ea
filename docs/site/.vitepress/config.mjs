// The documentation as a site: the repository's own Markdown, as it is. ./build copies the pages and
// this file to bin/site-src, where their modules are, and runs VitePress there.
import { existsSync, readdirSync, readFileSync } from 'node:fs'
import path from 'node:path'

const repository = process.env.LANDFALL_REPOSITORY
const onGitHub = 'https://github.com/landfall-lb/landfall/blob/main/'

// Pages that the site takes over. All else in the repository is linked where it is hosted.
const pages = ['README.md', 'CHANGELOG.md', 'CONTRIBUTING.md', 'charts/landfall/README.md']
const isPage = (file) => pages.includes(file) || /^docs\/(guide|reference|design)\/[^/]+\.md$/.test(file)

// The sidebar, in the order in which a newcomer reads. A page that no group names is at the end of
// its part, so that a new page is never lost.
const parts = [
  ['Guide', 'docs/guide', [
    'first-hour', 'install', 'sizing',
    'l2-homelab', 'vmware', 'bare-metal', 'kubeadm', 'k3s', 'rke2', 'talos', 'kube-proxy-replacement', 'beside-cni',
    'behind-a-load-balancer',
    'ipam', 'l2', 'bgp', 'bfd', 'proxy', 'relay', 'rollouts',
    'landfallctl', 'dashboard', 'troubleshooting', 'metrics', 'traces', 'security', 'upgrade-uninstall',
    'migrate-metallb', 'migrate-kube-proxy',
  ]],
  ['Reference', 'docs/reference', [
    'README', 'ipaddresspool', 'l2advertisement', 'bgpadvertisement', 'bgppeer', 'bfdprofile', 'community', 'annotations',
    'reasons', 'controller', 'speaker', 'proxy', 'relay', 'landfallctl',
  ]],
  ['Design', 'docs/design', ['design', 'packet-paths', 'path', 'nftables', 'rescue', 'relay', 'direct', 'model', 'bench', 'lab', 'cluster', 'kernels', 'conformance']],
]

function title(file) {
  return /^# (.*)$/m.exec(readFileSync(path.join(repository, file), 'utf8'))[1]
}

function sidebar(files) {
  return parts.map(([text, folder, first]) => {
    const named = first.map((name) => `${folder}/${name}.md`).filter((file) => files.includes(file))
    const others = files.filter((file) => file.startsWith(folder + '/') && !named.includes(file)).sort()
    const all = [...named, ...others]
    if (text === 'Reference') all.push('charts/landfall/README.md')
    return { text, collapsed: false, items: all.map((file) => ({ text: title(file), link: '/' + address(file) })) }
  })
}

// address is a page's place in the site: README.md is the index of its folder.
function address(file) {
  return file.replace(/(^|\/)README\.md$/, '$1index.md').replace(/\.md$/, '.html').replace(/(^|\/)index\.html$/, '$1')
}

// GitHub's way to name headings, so that links work there and here.
function slugify(text) {
  return text.toLowerCase().replace(/[^\p{L}\p{N}_\- ]/gu, '').replaceAll(' ', '-')
}

// follow rewrites the target of a link in a file: README.md is an index here, and what is not a page
// is on GitHub.
function follow(from, target) {
  if (/^[a-z]+:|^#/.test(target)) return target
  const [to, fragment] = target.split('#')
  const file = path.posix.join(path.posix.dirname(from), to)
  if (!existsSync(path.join(repository, file))) throw new Error(`${from} links ${target}, which does not exist`)
  if (!isPage(file)) return onGitHub + file
  return to.replace(/README\.md$/, 'index.md') + (fragment ? '#' + fragment : '')
}

const files = [...pages, ...parts.flatMap(([, folder]) => readdirSync(path.join(repository, folder))
  .filter((name) => name.endsWith('.md')).map((name) => folder + '/' + name))].sort()

export default {
  title: 'Landfall',
  description: 'A load balancer for Kubernetes on bare metal and VMware',
  head: [['link', { rel: 'icon', href: 'data:,' }]],
  base: process.env.SITE_BASE || '/',
  outDir: '../site',
  rewrites: Object.fromEntries(files.filter((f) => /(^|\/)README\.md$/.test(f))
    .map((f) => [f, f.replace(/README\.md$/, 'index.md')])),
  // Nothing comes from another host, and the time of a build is not in the pages.
  lastUpdated: false,
  metaChunk: true,
  markdown: {
    anchor: { slugify },
    config(md) {
      md.core.ruler.push('landfall-links', (state) => {
        const from = state.env.relativePath.replace(/(^|\/)index\.md$/, '$1README.md')
        for (const block of state.tokens) {
          for (const token of block.children ?? []) {
            if (token.type === 'link_open') token.attrSet('href', follow(from, token.attrGet('href')))
          }
        }
      })
    },
  },
  themeConfig: {
    search: { provider: 'local', options: { detailedView: true } },
    outline: { level: [2, 3] },
    sidebar: sidebar(files),
    nav: [
      { text: 'Guide', link: '/docs/guide/install.html' },
      { text: 'Reference', link: '/docs/reference/' },
      { text: 'Design', link: '/docs/design/design.html' },
      { text: 'Changelog', link: '/CHANGELOG.html' },
    ],
    socialLinks: [{ icon: 'github', link: 'https://github.com/landfall-lb/landfall' }],
  },
}
