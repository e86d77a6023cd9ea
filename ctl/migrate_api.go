package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/landfall-lb/landfall/ctl/migrate"
	"github.com/landfall-lb/landfall/internal/kube"
)

// server is what a migration asks of the API server: see [kube.Client.Send].
type server interface {
	Send(ctx context.Context, verb, uri, contentType string, body []byte) ([]byte, error)
}

// migrator changes objects for a migration. Each of its methods does nothing if it is done already,
// so that a migration that was interrupted can begin anew.
type migrator struct {
	server server
	out    io.Writer
	// wait is how long it waits for each thing, poll the time between two looks.
	wait, poll time.Duration
	// pause is what routers and proxies have between two nodes.
	pause time.Duration
}

const fieldManager = "landfallctl-migrate"

// sleep gives routers and proxies time.
func (m *migrator) sleep(ctx context.Context) error {
	select {
	case <-time.After(m.pause):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (m *migrator) say(format string, args ...any) { fmt.Fprintf(m.out, "  "+format+"\n", args...) }

// get returns an object, or a list; nil if there is none.
func (m *migrator) get(ctx context.Context, uri string) (map[string]any, error) {
	raw, err := m.server.Send(ctx, http.MethodGet, uri, "", nil)
	if raw == nil || err != nil {
		return nil, err
	}
	var o map[string]any
	if err := json.Unmarshal(raw, &o); err != nil {
		return nil, fmt.Errorf("%s: %w", uri, err)
	}
	return o, nil
}

// list returns the objects of a collection with these labels; none if the API server has no such
// kind.
func (m *migrator) list(ctx context.Context, collection, selector string) ([]map[string]any, error) {
	o, err := m.get(ctx, collection+"?labelSelector="+url.QueryEscape(selector))
	if err != nil {
		return nil, err
	}
	items, _ := o["items"].([]any)
	var all []map[string]any
	for _, item := range items {
		if object, ok := item.(map[string]any); ok {
			all = append(all, object)
		}
	}
	return all, nil
}

func name(o map[string]any) string { return text(o, "metadata", "name") }

// text returns a string below these keys, "" if there is none.
func text(from any, keys ...string) string {
	for _, key := range keys {
		m, _ := from.(map[string]any)
		from = m[key]
	}
	s, _ := from.(string)
	return s
}

func (m *migrator) patch(ctx context.Context, uri string, patch map[string]any) error {
	body, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	_, err = m.server.Send(ctx, http.MethodPatch, uri+"?fieldManager="+fieldManager, kube.MergePatch, body)
	return err
}

// change patches an object, which remembers what it was.
func (m *migrator) change(ctx context.Context, uri string, patch map[string]any) error {
	live, err := m.get(ctx, uri)
	if err != nil {
		return err
	}
	if live == nil {
		return fmt.Errorf("%s does not exist", uri)
	}
	patch, err = migrate.Remember(live, patch)
	if patch == nil || err != nil {
		return err
	}
	return m.patch(ctx, uri, patch)
}

// revert gives an object back what it was before change.
func (m *migrator) revert(ctx context.Context, uri string) error {
	live, err := m.get(ctx, uri)
	if live == nil || err != nil {
		return err
	}
	patch, err := migrate.Undo(live)
	if patch == nil || err != nil {
		return err
	}
	return m.patch(ctx, uri, patch)
}

// label sets a label, or removes it if value is "".
func (m *migrator) label(ctx context.Context, uri, key, value string) error {
	live, err := m.get(ctx, uri)
	if live == nil || err != nil || text(live, "metadata", "labels", key) == value {
		return err
	}
	var set any
	if value != "" {
		set = value
	}
	return m.patch(ctx, uri, map[string]any{"metadata": map[string]any{"labels": map[string]any{key: set}}})
}

// landfallKinds are those that a migration writes, in the order in which --undo deletes them.
var landfallKinds = []string{"L2Advertisement", "BGPAdvertisement", "BGPPeer", "BFDProfile", "Community",
	"IPAddressPool"}

func landfallPath(kind string) string {
	return "/apis/landfall.dev/v1beta1/" + strings.TrimSuffix(strings.ToLower(kind), "y") +
		map[bool]string{true: "ies", false: "s"}[strings.HasSuffix(kind, "y")]
}

// create creates objects, or makes those of an earlier run what they should be. An object that
// somebody else created must have the same specification. dry has the API server check only.
func (m *migrator) create(ctx context.Context, objects []migrate.Manifest, dry bool) error {
	var errs []error
	for _, o := range objects {
		uri := landfallPath(o.Kind) + "/" + o.Metadata.Name
		live, err := m.get(ctx, uri)
		if err != nil {
			return err
		}
		if live != nil && text(live, "metadata", "labels", migrate.LabelFrom) == "" {
			if !migrate.Within(o.Spec, live["spec"]) {
				errs = append(errs, fmt.Errorf("%s %s exists already and differs: delete or rename one", o.Kind, o.Metadata.Name))
			}
			continue
		}
		err = m.apply(ctx, uri, migrate.Mark(o), dry)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// apply is kubectl apply --server-side.
func (m *migrator) apply(ctx context.Context, uri string, object any, dry bool) error {
	body, err := json.Marshal(object)
	if err != nil {
		return err
	}
	uri += "?force=true&fieldValidation=Strict&fieldManager=" + fieldManager
	if dry {
		uri += "&dryRun=All"
	}
	_, err = m.server.Send(ctx, http.MethodPatch, uri, kube.ApplyPatch, body)
	return err
}

// remove deletes the objects of these kinds that a migration created.
func (m *migrator) remove(ctx context.Context, kinds ...string) error {
	for _, kind := range kinds {
		created, err := m.list(ctx, landfallPath(kind), migrate.LabelFrom+"="+migrate.FromMetalLB)
		if err != nil {
			return err
		}
		for _, o := range created {
			if _, err := m.server.Send(ctx, http.MethodDelete, landfallPath(kind)+"/"+name(o), "", nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// until looks until f is content. What f returns says what is still missing.
func (m *migrator) until(ctx context.Context, what string, f func() (missing string, err error)) error {
	deadline := time.NewTimer(m.wait)
	defer deadline.Stop()
	tick := time.NewTicker(m.poll)
	defer tick.Stop()
	for {
		missing, err := f()
		if err == nil && missing == "" {
			return nil
		}
		if err != nil {
			missing = err.Error()
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-deadline.C:
			return fmt.Errorf("%s: not within %s: %s", what, m.wait, missing)
		case <-tick.C:
		}
	}
}

// selector writes labels as a selector.
func selector(labels map[string]string) string {
	var all []string
	for key, value := range labels {
		all = append(all, key+"="+value)
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// noPods waits until no pod with these labels is left, on a node or, if node is "", at all.
func (m *migrator) noPods(ctx context.Context, namespace string, labels map[string]string, node string) error {
	uri := "/api/v1/namespaces/" + namespace + "/pods"
	return m.until(ctx, "pods end", func() (string, error) {
		pods, err := m.list(ctx, uri, selector(labels))
		var left []string
		for _, p := range pods {
			phase := text(p, "status", "phase")
			if at := text(p, "spec", "nodeName"); (node == "" || at == node) && phase != "Succeeded" && phase != "Failed" {
				left = append(left, name(p))
			}
		}
		return strings.Join(left, ", "), err
	})
}

// workloadsReady waits until workloads have all the pods that they want.
func (m *migrator) workloadsReady(ctx context.Context, workloads []migrate.Workload) error {
	return m.until(ctx, "pods are ready", func() (string, error) {
		nodes, err := m.list(ctx, nodesPath, "")
		if err != nil {
			return "", err
		}
		down := len(migrate.NotReadyNodes(nodes))
		var missing []string
		for _, w := range workloads {
			o, err := m.get(ctx, workloadPath(w))
			if err != nil {
				return "", err
			}
			if why := migrate.NotReady(o, down); why != "" {
				missing = append(missing, fmt.Sprintf("%s: %s", w, why))
			}
		}
		return strings.Join(missing, ", "), nil
	})
}

// unlabelNodes removes a label of a migration from Nodes.
func (m *migrator) unlabelNodes(ctx context.Context, label, product string) error {
	nodes, err := m.list(ctx, nodesPath, label+"="+product)
	if err != nil {
		return err
	}
	for _, o := range nodes {
		if err := m.label(ctx, nodesPath+"/"+name(o), label, ""); err != nil {
			return err
		}
	}
	return nil
}
