package main

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"

	"github.com/landfall-lb/landfall/internal/kube"
	"github.com/landfall-lb/landfall/internal/lb"
	"github.com/landfall-lb/landfall/internal/ops"
)

// Bounds of a bundle, before compression.
const (
	maxBundle    = 256 << 20
	maxObjects   = 32 << 20 // of one kind
	maxStatus    = 4 << 20  // of one program
	maxLog       = 2 << 20  // of one container
	logLines     = 5000
	objectsAPage = 500
	// bundleAtOnce is how many programs are asked at a time.
	bundleAtOnce = 8
)

func bundleCommand(o *options) *cobra.Command {
	path := ""
	cmd := &cobra.Command{
		Use: "bundle", Short: "Write one archive for a bug report: objects, status of all programs, logs; no secrets",
		Long: "Write one archive for a bug report: Landfall's objects, Services, EndpointSlices, Nodes, Leases and Events, " +
			"the status, metrics and logs of all of Landfall's programs, and what doctor says. It never reads Secrets, and " +
			"leaves out passwords, values of environment variables, and annotations that are neither Landfall's nor " +
			"Kubernetes'. manifest.txt in it lists the files, and what could not be read. Names, addresses and selectors " +
			"of all Services are in it.",
		Example: "  landfallctl bundle\n  landfallctl bundle -o json | jq -r '.notRead[]'\n" +
			"  landfallctl bundle -f - | ssh admin@host 'cat > bundle.tar.gz'",
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "-" && o.output != "" {
				return errors.New("-o and -f - would both write to standard output")
			}
			return runBundle(cmd.Context(), *o, path, unfiltered(cmd.OutOrStdout()), cmd.ErrOrStderr())
		},
	}
	cmd.Flags().StringVarP(&path, "filename", "f", "",
		"`file` to write; - is standard output (default: landfall-bundle-TIME.tar.gz in this directory)")
	o.addOutput(cmd, "json", "yaml")
	return cmd
}

func runBundle(ctx context.Context, o options, path string, stdout, stderr io.Writer) error {
	short, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	client, server, err := o.connect(short)
	if err != nil {
		return err
	}
	name := "landfall-bundle-" + server.Now.UTC().Format("20060102T150405Z")
	out := stdout
	if path != "-" {
		if path == "" {
			path = name + ".tar.gz"
		}
		file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return err
		}
		defer file.Close()
		out = file
	}
	b := newBundle(client, server, o, name, out)
	if err := b.write(ctx); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if o.output == "" { // standard output may be the archive
		stdout = stderr
	}
	text := fmt.Sprintf("%s: %s, %d MiB unpacked; %s\n", path, count(len(b.files), "file"), b.size>>20, b.unreadText())
	return write(stdout, o.output, bundled{path, b.files, append([]string{}, b.missed...)}, text)
}

// bundled is what --output prints of a bundle.
type bundled struct {
	Archive string        `json:"archive"`
	Files   []bundledFile `json:"files"`
	// NotRead says what could not be read, and why.
	NotRead []string `json:"notRead"`
}

// bundledFile is a file in a bundle.
type bundledFile struct {
	Name  string `json:"name"`
	Bytes int    `json:"bytes"`
	// Part says which part of it is there, if it is not whole.
	Part string `json:"part,omitempty"`
}

// bundle collects files into an archive.
type bundle struct {
	*gatherer
	name string
	gzip *gzip.Writer
	tar  *tar.Writer
	// most is what all files may have, in bytes.
	most int

	// execUpTo and log are those of the client.
	execUpTo func(ctx context.Context, most int, pod lb.Key, container string, command ...string) ([]byte, error)
	log      func(ctx context.Context, pod lb.Key, container string, previous bool) ([]byte, bool, error)

	mu     sync.Mutex
	redact redactor
	size   int
	files  []bundledFile
	missed []string // what could not be read, and why
	err    error    // the first of the archive
}

func newBundle(client *kube.Client, server kube.Server, o options, name string, to io.Writer) *bundle {
	compressed := gzip.NewWriter(to)
	return &bundle{gatherer: newGatherer(client, server, o), name: name, gzip: compressed, tar: tar.NewWriter(compressed),
		most: maxBundle, redact: redactor{secrets: map[string]bool{}}, execUpTo: client.ExecUpTo,
		log: func(ctx context.Context, pod lb.Key, container string, previous bool) ([]byte, bool, error) {
			return client.PodLog(ctx, pod, container, previous, logLines, maxLog)
		}}
}

func (b *bundle) write(ctx context.Context) error {
	b.within(ctx, "the cluster", func(ctx context.Context) error { return b.read(ctx) })
	b.objects(ctx)
	b.within(ctx, "doctor.txt", func(ctx context.Context) error {
		v, err := examine(ctx, b.gatherer, "")
		if err == nil {
			b.add("doctor.txt", []byte(verdictText(v.In(b.opts.home()), true)), "")
		}
		return err
	})
	for _, u := range b.cluster.Unread {
		b.miss(u.What, errors.New(u.Why+"; "+u.Grant))
	}
	b.programs(ctx)
	b.versions()
	b.add("manifest.txt", b.manifest(), "")
	return errors.Join(b.err, b.tar.Close(), b.gzip.Close())
}

// within gives one question its time, and notes why it has no answer.
func (b *bundle) within(ctx context.Context, what string, ask func(context.Context) error) {
	ctx, cancel := context.WithTimeoutCause(ctx, b.opts.timeout, fmt.Errorf("no answer within %s", b.opts.timeout))
	defer cancel()
	if err := ask(ctx); err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		b.miss(what, err)
	}
}

func (b *bundle) miss(what string, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if line := fmt.Sprintf("%s: %v", what, err); !slices.Contains(b.missed, line) {
		b.missed = append(b.missed, line)
	}
}

// add adds a file, without the secrets that are known. cut says why it is not whole.
func (b *bundle) add(name string, content []byte, cut string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	content = b.redact.text(content)
	if b.size+len(content) > b.most && name != "manifest.txt" {
		b.missed = append(b.missed, fmt.Sprintf("%s: the bundle is full: it has no room for %d bytes", name, len(content)))
		return
	}
	b.size += len(content)
	b.files = append(b.files, bundledFile{name, len(content), cut})
	err := b.tar.WriteHeader(&tar.Header{Name: b.name + "/" + name, Mode: 0o600, Size: int64(len(content)),
		ModTime: b.server.Now, Typeflag: tar.TypeReg})
	if err == nil {
		_, err = b.tar.Write(content)
	}
	if b.err == nil {
		b.err = err
	}
}

// objects adds the objects of each kind. Those with passwords come first, so that these are known.
func (b *bundle) objects(ctx context.Context) {
	const landfall = "/apis/landfall.dev/v1beta1/"
	in := func(group, resource string) string { return group + "/namespaces/" + b.opts.home() + "/" + resource }
	for _, kind := range []struct {
		file, path string
		// shorten leaves out what is not of interest; nil for nothing.
		shorten func(map[string]any) bool
	}{
		{"bgppeers", landfall + "bgppeers", nil},
		{"ipaddresspools", landfall + "ipaddresspools", nil},
		{"l2advertisements", landfall + "l2advertisements", nil},
		{"bgpadvertisements", landfall + "bgpadvertisements", nil},
		{"bfdprofiles", landfall + "bfdprofiles", nil},
		{"communities", landfall + "communities", nil},
		{"daemonsets", in("/apis/apps/v1", "daemonsets"), nil},
		{"deployments", in("/apis/apps/v1", "deployments"), nil},
		{"pods", in("/api/v1", "pods"), nil},
		{"leases", in("/apis/coordination.k8s.io/v1", "leases"), nil},
		{"configmaps", in("/api/v1", "configmaps"), namesOnly},
		{"nodes", "/api/v1/nodes", nil},
		{"services", "/api/v1/services", nil},
		{"endpointslices", "/apis/discovery.k8s.io/v1/endpointslices", nil},
		{"events", "/api/v1/events", ofLandfall},
	} {
		b.within(ctx, kind.file, func(ctx context.Context) error {
			content, cut, err := b.list(ctx, kind.path, kind.shorten)
			if err == nil {
				b.add("objects/"+kind.file+".json", content, cut)
			}
			return err
		})
	}
}

// namesOnly leaves the names and the keys of a ConfigMap.
func namesOnly(o map[string]any) bool {
	for _, field := range []string{"data", "binaryData"} {
		if data, ok := o[field].(map[string]any); ok {
			o[field] = slices.Sorted(maps.Keys(data))
		}
	}
	return true
}

// ofLandfall selects Events of Landfall's programs, about them, and about Nodes and Services.
func ofLandfall(o map[string]any) bool {
	source, _ := o["source"].(map[string]any)
	component, _ := source["component"].(string)
	reporter, _ := o["reportingComponent"].(string)
	about, _ := o["involvedObject"].(map[string]any)
	name, _ := about["name"].(string)
	return strings.HasPrefix(component+reporter, "landfall") || strings.Contains(name, "landfall") ||
		about["kind"] == "Node" || about["kind"] == "Service"
}

// list reads all objects of a kind, page by page, and redacts them: one object a line, in a list as
// the API server gives it.
func (b *bundle) list(ctx context.Context, path string, shorten func(map[string]any) bool) (
	content []byte, cut string, err error) {
	var out bytes.Buffer
	out.WriteString(`{"apiVersion":"v1","kind":"List","items":[`)
	separator, next, read := "\n", "", 0
	for page := true; page; page = next != "" {
		raw, err := b.client.RawPage(ctx, path, objectsAPage, next)
		if err != nil {
			return nil, "", err
		}
		if raw == nil {
			return nil, "", errors.New("the API server does not know this kind")
		}
		var list struct {
			Metadata struct {
				Continue string `json:"continue"`
			} `json:"metadata"`
			Items []map[string]any `json:"items"`
		}
		if err := json.Unmarshal(raw, &list); err != nil {
			return nil, "", err
		}
		for _, o := range list.Items {
			if shorten != nil && !shorten(o) {
				continue
			}
			b.redact.object(o)
			line, err := json.Marshal(o)
			if err != nil {
				return nil, "", err
			}
			if out.Len()+len(line) > maxObjects {
				return append(out.Bytes(), "\n]}\n"...), fmt.Sprintf("the first %d objects", read), nil
			}
			out.WriteString(separator)
			out.Write(line)
			separator, read = ",\n", read+1
		}
		next = list.Metadata.Continue
	}
	return append(out.Bytes(), "\n]}\n"...), "", nil
}

// programs adds the status, the metrics and the logs of all of Landfall's containers.
func (b *bundle) programs(ctx context.Context) {
	var group errgroup.Group
	group.SetLimit(bundleAtOnce)
	for _, p := range b.pods {
		for _, c := range p.Containers {
			if program(c) == "" {
				continue
			}
			at := fmt.Sprintf("programs/%s/%s", p.Name, c.Name)
			group.Go(func() error {
				if c.Running && program(c) != "landfall-controller" {
					b.asked(ctx, p, c, at+".status.json", "")
					b.asked(ctx, p, c, at+".metrics.txt", "metrics")
				}
				for _, previous := range []bool{false, true} {
					if previous && c.Restarts == 0 {
						continue
					}
					file := at + map[bool]string{false: ".log", true: ".previous.log"}[previous]
					b.within(ctx, file, func(ctx context.Context) error {
						log, more, err := b.log(ctx, p.Key, c.Name, previous)
						if err == nil {
							b.add(file, log, map[bool]string{true: "the end"}[more])
						}
						return err
					})
				}
				return nil
			})
		}
	}
	_ = group.Wait() // what fails is noted
}

func (b *bundle) asked(ctx context.Context, p kube.PodState, c kube.Container, file, only string) {
	b.within(ctx, file, func(ctx context.Context) error {
		command := c.Command[:1:1]
		if program(c) == "landfall-relay" {
			command = c.Command[:2:2]
		}
		said, err := b.execUpTo(ctx, maxStatus+1, p.Key, c.Name, append(command, "status", "--status-only="+only)...)
		switch {
		case err != nil:
			return err
		case len(said) > maxStatus:
			b.add(file, said[:maxStatus], fmt.Sprintf("the first %d bytes", maxStatus))
		default:
			b.add(file, said, "")
		}
		return nil
	})
}

func (b *bundle) versions() {
	v := versions{Client: ops.BuildVersion(), APIServer: b.server.Version, Images: map[string]int{}}
	for _, p := range b.pods {
		for _, c := range p.Containers {
			if program(c) != "" {
				v.Images[c.Image]++
			}
		}
	}
	b.add("version.txt", []byte(v.text()), "")
}

func (b *bundle) manifest() []byte {
	var out strings.Builder
	fmt.Fprintf(&out, "landfallctl bundle of %s\n\nFiles, with their bytes:\n", b.server.Now.UTC().Format(time.RFC3339))
	slices.SortFunc(b.files, func(a, b bundledFile) int {
		return cmp.Or(cmp.Compare(a.Bytes, b.Bytes), strings.Compare(a.Name, b.Name))
	})
	for _, f := range b.files {
		part := ""
		if f.Part != "" {
			part = "  (" + f.Part + ")"
		}
		fmt.Fprintf(&out, "%10d  %s%s\n", f.Bytes, f.Name, part)
	}
	fmt.Fprintf(&out, "\nLeft out: Secrets, contents of ConfigMaps, passwords, values of environment variables, "+
		"annotations\nthat are neither Landfall's nor Kubernetes', managedFields.\n\nNot read: %s\n", b.unreadText())
	slices.Sort(b.missed)
	for _, line := range b.missed {
		fmt.Fprintf(&out, "  %s\n", line)
	}
	return []byte(out.String())
}

func (b *bundle) unreadText() string {
	if len(b.missed) == 0 {
		return "everything was read"
	}
	return count(len(b.missed), "thing") + " could not be read, see manifest.txt"
}
