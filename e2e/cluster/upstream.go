package cluster

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/e2e/cache"
	"github.com/landfall-lb/landfall/e2e/lab"
	"github.com/landfall-lb/landfall/release/image"
)

// Names of images as the guides and MetalLB's manifests have them.
const (
	kubeProxyImage    = "registry.k8s.io/kube-proxy:v1.35.4"
	publishedPause    = "registry.k8s.io/pause:3.10"
	publishedLandfall = "ghcr.io/landfall-lb/landfall:0.1.0"
	metallbController = "quay.io/metallb/controller:v0.14.9"
	metallbSpeaker    = "quay.io/metallb/speaker:v0.14.9"
)

// kubeProxy is what kubeadm installs. SERVER is the API server.
const kubeProxy = `apiVersion: v1
kind: ServiceAccount
metadata: {name: kube-proxy, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: kubeadm:node-proxier}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: ServiceAccount, name: kube-proxy, namespace: kube-system}]
---
apiVersion: v1
kind: ConfigMap
metadata: {name: kube-proxy, namespace: kube-system, labels: {app: kube-proxy}}
data:
  config.conf: |
    apiVersion: kubeproxy.config.k8s.io/v1alpha1
    kind: KubeProxyConfiguration
    bindAddress: 0.0.0.0
    clientConnection: {kubeconfig: /var/lib/kube-proxy/kubeconfig.conf}
    clusterCIDR: PODS
    conntrack: {maxPerCore: 0, tcpEstablishedTimeout: 0s, tcpCloseWaitTimeout: 0s}
    mode: MODE
  kubeconfig.conf: |
    apiVersion: v1
    kind: Config
    clusters:
    - name: default
      cluster: {certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt, server: SERVER}
    contexts:
    - {name: default, context: {cluster: default, namespace: default, user: default}}
    current-context: default
    users:
    - {name: default, user: {tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token}}
---
apiVersion: apps/v1
kind: DaemonSet
metadata: {name: kube-proxy, namespace: kube-system, labels: {k8s-app: kube-proxy}}
spec:
  selector: {matchLabels: {k8s-app: kube-proxy}}
  template:
    metadata: {labels: {k8s-app: kube-proxy}}
    spec:
      priorityClassName: system-node-critical
      serviceAccountName: kube-proxy
      hostNetwork: true
      nodeSelector: {kubernetes.io/os: linux}
      tolerations: [{operator: Exists}]
      containers:
      - name: kube-proxy
        image: ` + kubeProxyImage + `
        command: [/usr/local/bin/kube-proxy, --config=/var/lib/kube-proxy/config.conf, --hostname-override=$(NODE_NAME)]
        env: [{name: NODE_NAME, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}]
        securityContext: {privileged: true}
        volumeMounts:
        - {name: kube-proxy, mountPath: /var/lib/kube-proxy}
        - {name: xtables-lock, mountPath: /run/xtables.lock}
        - {name: lib-modules, mountPath: /lib/modules, readOnly: true}
      volumes:
      - {name: kube-proxy, configMap: {name: kube-proxy}}
      - {name: xtables-lock, hostPath: {path: /run/xtables.lock, type: FileOrCreate}}
      - {name: lib-modules, hostPath: {path: /lib/modules}}
`

// metallbObjects announce the addresses of [Webs] by ARP and BGP.
const metallbObjects = `apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: lan, namespace: metallb-system}
spec: {addresses: [172.30.0.200-172.30.0.229]}
---
apiVersion: metallb.io/v1beta1
kind: L2Advertisement
metadata: {name: lan, namespace: metallb-system}
spec: {ipAddressPools: [lan]}
---
apiVersion: metallb.io/v1beta1
kind: IPAddressPool
metadata: {name: routed, namespace: metallb-system}
spec: {addresses: [203.0.113.0/27], autoAssign: false}
---
apiVersion: metallb.io/v1beta1
kind: BGPAdvertisement
metadata: {name: routed, namespace: metallb-system}
spec: {ipAddressPools: [routed]}
---
apiVersion: metallb.io/v1beta2
kind: BGPPeer
metadata: {name: tor-1, namespace: metallb-system}
spec: {myASN: 64500, peerASN: 64501, peerAddress: 172.30.0.1}
`

// UpstreamImages writes the archives of kube-proxy's image and of MetalLB's, for [Options.Archives].
// Their programs are upstream's; kube-proxy's lie beside the tools of iptables that Landfall's image
// has.
func UpstreamImages(ctx context.Context, progress func(line string)) ([]string, error) {
	repository, err := lab.FindRepository(".")
	if err != nil {
		return nil, err
	}
	kept, err := cache.Folder()
	if err != nil {
		return nil, err
	}
	proxy, err := lab.Tool(ctx, repository, "kube-proxy", progress)
	if err != nil {
		return nil, err
	}
	metallb, _, err := lab.MetalLB(ctx, progress)
	if err != nil {
		return nil, err
	}
	debian, _, err := image.Debian(ctx, runtime.GOARCH, kept)
	if err != nil {
		return nil, err
	}
	var archives []string
	for _, i := range []struct {
		name, program, path string
		layers              [][]image.File
	}{
		{kubeProxyImage, proxy, "usr/local/bin/kube-proxy", [][]image.File{debian}},
		{metallbController, filepath.Join(metallb, "controller"), "controller", nil},
		{metallbSpeaker, filepath.Join(metallb, "speaker"), "speaker", nil},
	} {
		progress("image " + i.name)
		content, err := os.ReadFile(i.program)
		if err != nil {
			return nil, err
		}
		made := image.Image{Arch: runtime.GOARCH, Fast: true,
			Layers: append(i.layers, []image.File{{Path: i.path, Mode: 0o755, Content: content},
				{Path: "tmp", Mode: fs.ModeDir | fs.ModeSticky | 0o777}}),
			Config: image.Config{Entrypoint: []string{"/" + i.path},
				Env: []string{"PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}}}
		archives = append(archives, filepath.Join(kept, "images", filepath.Base(i.program)+"-upstream.tar"))
		if _, err := image.Write(archives[len(archives)-1], i.name, made); err != nil {
			return nil, err
		}
	}
	return archives, nil
}

// publish gives images on the nodes the names that a registry would have them under.
func (c *Cluster) publish(ctx context.Context) error {
	var g lab.Group
	for _, n := range c.nodes {
		g.Run(func() error {
			for to, from := range map[string]string{publishedLandfall: Image, publishedPause: PauseImage} {
				if _, err := n.Run(ctx, "ctr", "-n", "k8s.io", "images", "tag", "--force", from, to); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return g.Wait()
}

// installKubeProxy runs kube-proxy on all nodes, as kubeadm does.
func (c *Cluster) installKubeProxy(ctx context.Context, mode string) error {
	manifest := strings.NewReplacer("SERVER", "https://"+controlPlane.Addr.String()+":6443", "MODE", mode,
		"PODS", c.Lab.Cluster().PodNetwork.String()).Replace(kubeProxy)
	if err := c.ApplyYAML(ctx, manifest); err != nil {
		return err
	}
	return c.WaitPods(ctx, "kube-system", "k8s-app=kube-proxy", len(c.nodes))
}

// installMetalLB installs MetalLB as its own manifests say, and objects that configure it.
func (c *Cluster) installMetalLB(ctx context.Context, objects string) error {
	programs, _, err := lab.MetalLB(ctx, c.options.Progress)
	if err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(programs, lab.MetalLBManifest))
	if err != nil {
		return err
	}
	if err := c.ApplyYAML(ctx, string(text)); err != nil {
		return err
	}
	if err := c.WaitPods(ctx, "metallb-system", "component=speaker", len(c.nodes)); err != nil {
		return err
	}
	if err := c.WaitPods(ctx, "metallb-system", "component=controller", 1); err != nil {
		return err
	}
	return lab.WaitFor(ctx, c.options.Progress, "MetalLB's webhooks", 2*time.Minute, func(ctx context.Context) error {
		return c.ApplyYAML(ctx, objects)
	})
}
