package kube

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/landfall-lb/landfall/internal/lb"
)

// The annotations of the Lease. An annotation that says that it is not all ends in more.
const (
	annotationLive     = "landfall.dev/live"
	annotationUnserved = "landfall.dev/unserved"
	more               = "more"
	// unservedKept bounds the annotation's size: 45 bytes for each address, of the 256 KiB that an
	// object's annotations may have.
	unservedKept = 4000
)

// Witnesses reads and writes the one Lease by which speakers tell those that they do not see that
// they are at work.
type Witnesses struct {
	core            kinds
	namespace, name string
}

// Witnesses returns the access to a Lease.
func (c *Client) Witnesses(namespace, name string) *Witnesses {
	return &Witnesses{core: c.core, namespace: namespace, name: name}
}

// Read returns what the Lease says, and its version, which each write changes; "" while there is no
// Lease.
func (w *Witnesses) Read(ctx context.Context) (said lb.Witness, version string, err error) {
	lease, err := w.core.Leases(w.namespace).Get(ctx, w.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return said, "", nil
	}
	if err != nil {
		return said, "", fmt.Errorf("read Lease %s/%s: %w", w.namespace, w.name, err)
	}
	return convertWitness(lease), lease.ResourceVersion, nil
}

// Write replaces what the Lease of the given version says, or creates it if there is none, and
// returns its new version. It fails with a conflict (see IsConflict) if somebody else has written.
func (w *Witnesses) Write(ctx context.Context, says lb.Witness, version string) (string, error) {
	lease := leaseOf(says)
	lease.Namespace, lease.Name, lease.ResourceVersion = w.namespace, w.name, version
	var err error
	if version == "" {
		lease, err = w.core.Leases(w.namespace).Create(ctx, lease, metav1.CreateOptions{})
	} else {
		lease, err = w.core.Leases(w.namespace).Update(ctx, lease, metav1.UpdateOptions{})
	}
	if err != nil {
		return "", fmt.Errorf("write Lease %s/%s: %w", w.namespace, w.name, err)
	}
	return lease.ResourceVersion, nil
}

func leaseOf(w lb.Witness) *coordinationv1.Lease {
	var unserved []string
	for i, vip := range w.Unserved {
		if i == unservedKept || w.Partial {
			unserved = append(unserved, more)
			break
		}
		unserved = append(unserved, vip.String())
	}
	if w.Partial && len(unserved) == 0 {
		unserved = []string{more}
	}
	at := metav1.NewMicroTime(w.At)
	return &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{
			annotationLive: strings.Join(w.Live, ","), annotationUnserved: strings.Join(unserved, ","),
		}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &w.Node, RenewTime: &at},
	}
}

// convertWitness reads a Lease. What cannot be read counts as there being more.
func convertWitness(lease *coordinationv1.Lease) lb.Witness {
	var w lb.Witness
	if lease.Spec.HolderIdentity != nil {
		w.Node = *lease.Spec.HolderIdentity
	}
	if lease.Spec.RenewTime != nil {
		w.At = lease.Spec.RenewTime.Time.Truncate(time.Microsecond)
	}
	for name := range strings.SplitSeq(lease.Annotations[annotationLive], ",") {
		if name != "" {
			w.Live = append(w.Live, name)
		}
	}
	unserved, said := lease.Annotations[annotationUnserved]
	w.Partial = !said
	for text := range strings.SplitSeq(unserved, ",") {
		if text == "" {
			continue
		}
		vip, err := netip.ParseAddr(text)
		if err != nil {
			w.Partial = true
			continue
		}
		w.Unserved = append(w.Unserved, vip)
	}
	slices.Sort(w.Live)
	slices.SortFunc(w.Unserved, netip.Addr.Compare)
	return w
}
